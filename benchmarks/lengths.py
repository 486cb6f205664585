"""Do INT8 rollouts pay at every length? python benchmarks/lengths.py (two hours), --only a part, --tokens, or --quick.

Against an older commit of this package, in a worktree that is made for it, and against this one:

- Whole steps of SmolLM2-135M, exactly 16, 64 and 256 new tokens, one update each, with INT8 rollouts and in float32.
- Decode steps in float32 of a 1.1B Llama with random weights, 1 to 8 rows.

All of them take turns, round by round; ratios are medians over rounds. `make smollm2` installs the weights. Writes
benchmarks/results/lengths.{json,md}.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from shared import RESULTS, ROOT, machine

Part = Literal["steps", "decode"]
EARLIER = "80138d4"
"""The last commit whose float32 products were all MKL's."""
FLOAT32 = ("rollout.quantization=none", "quantization.uaq_scale=1", "algorithm.correction=ignore")
TOKENS, ROWS = (16, 64, 256), (1, 2, 4, 8)
DECODE = """
import sys, time
sys.path.insert(0, "benchmarks")
import engines, torch
torch.set_num_threads(int(sys.argv[1]))
spec, _ = engines.shape_of("1.1B"), torch.manual_seed(0)
made = engines.engine(spec, None, "none", slots=8)
for line in sys.stdin:
    rows, new = map(int, line.split())
    batch = lambda length: engines.requests(32000, [length] * rows, 8)
    began = time.perf_counter()
    made.generate(batch(1), version=1)
    first = time.perf_counter()
    made.generate(batch(1 + new), version=1)
    print((time.perf_counter() - first) - (first - began), flush=True)
"""
"""Program that reads rows and decode steps, and prints the seconds of these steps without their prompts."""


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Yield a folder with that commit's files, and remove it in the end."""
    folder = ROOT / "runs" / f"worktree-{commit}"
    subprocess.run(["git", "worktree", "add", "--force", "--detach", folder, commit], cwd=ROOT, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def in_tree(tree: Path) -> dict[str, Any]:
    """Return arguments with which subprocess runs the package of that tree, whatever is installed."""
    return {"cwd": tree, "env": {**os.environ, "PYTHONPATH": str(tree)}}


def step_seconds(tree: Path, folder: Path, *settings: str) -> tuple[float, float]:
    """Run SmolLM2's preset with the code of a tree. Return the medians of its steps' seconds, and of those without the
    update, whose work is the same for all arms. The first step, which warms up, does not count."""
    places = [tree / folder / "smollm2_135m.yaml" for folder in ("qurl_ray/configs", "jobs/configs")]
    config = next(place for place in places if place.exists())  # earlier commits have the second
    command = [sys.executable, "jobs/qurl_dapo.py", "--config", str(config), "--fresh"]
    command += ["name=one", f"output_dir={folder}", "tracking.mlflow=false", "tracking.console=none", *settings]
    subprocess.run(command, check=True, **in_tree(tree))
    events = [json.loads(line) for line in (folder / "one" / "metrics.jsonl").read_text().splitlines()]
    values = [event["values"] for event in events if event["kind"] == "step"][1:]
    steps = [one["time/step"] for one in values]
    return statistics.median(steps), statistics.median(
        step - one["time/update"] for step, one in zip(steps, values, strict=True)
    )


def steps(earlier: Path, rounds: int, tokens: Sequence[int], threads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure seconds of whole steps, and without their updates, by number of new tokens and arm, round by round."""
    arms = {"float32, earlier": (earlier, FLOAT32), "float32": (ROOT, FLOAT32), "INT8": (ROOT, ())}
    common = (
        "rollout.ignore_eos=true", "algorithm.dynamic_sampling=false", "algorithm.updates_per_rollout=1",
        "learner.lr=1e-6", "learner.lr_final_share=1", f"learner.threads={threads}", f"rollout.threads={threads}",
        "evaluation.every=0", "evaluation.problems=8", "checkpoint.every=0", "export.quantized=none",
    )  # fmt: skip
    whole: dict[str, dict[str, list[float]]] = {str(new): {name: [] for name in arms} for new in tokens}
    rest: dict[str, dict[str, list[float]]] = {str(new): {name: [] for name in arms} for new in tokens}
    for new in tokens:
        # 64 samples a step as in the preset; 32 of 256 tokens, which take as long.
        sizes = (f"rollout.max_new_tokens={new}", f"model.max_length={48 + new}", f"steps={5 if new < 64 else 3}")
        sizes += (f"rollout.prompts_per_step={8 if new > 64 else 16}",)
        for _ in range(rounds):
            for name, (tree, settings) in arms.items():
                step, without = step_seconds(tree, ROOT / "runs" / "lengths", *common, *sizes, *settings)
                whole[str(new)][name].append(step)
                rest[str(new)][name].append(without)
                print(f"{new} tokens, {name}: {step:.3g} s, {without:.3g} without the update", flush=True)
    return whole, rest


def decode(earlier: Path, rounds: int, rows: Sequence[int], threads: int) -> dict[str, Any]:
    """Measure milliseconds of a decode step of the 1.1B shape in float32, by rows and arm, round by round."""
    with ExitStack() as stack:
        made = {
            name: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", DECODE, str(threads)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    **in_tree(tree),
                )
            )
            for name, tree in (("float32, earlier", earlier), ("float32", ROOT))
        }

        def measured(name: str, count: int, new: int) -> float:
            one = made[name]
            print(count, new, file=one.stdin, flush=True)
            return 1000 * float(one.stdout.readline()) / new

        for name in made:
            measured(name, 1, 64)  # weights are packed after some calls
        found = {str(count): {name: [] for name in made} for count in rows}
        for _ in range(rounds):
            for count in rows:
                for name in made:
                    found[str(count)][name].append(measured(name, count, 16))
    return found


def table(title: str, unit: str, found: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return the lines of a table: medians, and ratios as medians over rounds."""
    arms = list(next(iter(found.values())))
    last = arms[-1]
    lines = [f"| {title} | {' | '.join(f'{arm}, {unit}' for arm in arms)} | "]
    lines[0] += " | ".join(f"{last} over {arm}" for arm in arms[:-1]) + " |"
    lines.append("|" + "---|" * (2 * len(arms)))
    for size, took in found.items():
        times = [f"{statistics.median(took[arm]):.4g}" for arm in arms]
        ratios = [[a / b for a, b in zip(took[arm], took[last], strict=True)] for arm in arms[:-1]]
        shown = [f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in ratios]
        lines.append(f"| {size} | {' | '.join(times)} | {' | '.join(shown)} |")
    return lines


TITLES: dict[str, tuple[str, str]] = {
    "steps": ("new tokens, SmolLM2-135M, whole steps", "s"),
    "rest": ("new tokens, the same without updates", "s"),
    "decode": ("rows, 1.1B, decode step", "ms"),
}


def main(
    quick: Annotated[bool, typer.Option(help="One round; without 256 tokens.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of whole steps, without --quick.")] = 3,
    only: Annotated[Part | None, typer.Option(help="A part, beside what FILE has of the other.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="With --only steps: these lengths; others stay.")] = None,
    commit: Annotated[str, typer.Option(help="The older commit.")] = EARLIER,
    threads: Annotated[int, typer.Option(help="Threads of each process.")] = 2,
    out: Annotated[Path, typer.Option(help="The JSON file; the tables go beside it.")] = RESULTS / "lengths.json",
) -> None:
    """Measure whole steps of SmolLM2 by length of the answers, and float32 decode steps of a 1.1B model."""
    figures: dict[str, Any] = json.loads(out.read_text()) if only and out.exists() else {"machines": {}}
    with worktree(commit) as earlier:
        for part in [only] if only else get_args(Part):
            if part == "steps":
                measured = steps(earlier, 1 if quick else rounds, tokens or TOKENS[: 2 if quick else 3], threads)
                for key, found in zip(("steps", "rest"), measured, strict=True):
                    figures[key] = {**(figures.get(key, {}) if tokens else {}), **found}
            else:
                figures[part] = decode(earlier, 2 if quick else 7, ROWS, threads)
            figures["machines"][part] = f"{machine()}, {threads} threads; earlier: {commit}"
            out.write_text(json.dumps(figures, indent=2) + "\n")  # keeps the measured part if the next one fails
    lines = ["# Whole steps and decode steps, by length", "", "`python benchmarks/lengths.py`"]
    lines += [f"- {part}: {where}" for part, where in figures["machines"].items()]
    for part, (title, unit) in TITLES.items():
        if part in figures:
            lines += ["", *table(title, unit, figures[part])]
    print("\n".join(lines))
    out.with_suffix(".md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    typer.run(main)
