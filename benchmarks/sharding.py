"""Learners of several ranks: python benchmarks/sharding.py (half an hour), --only states|answers|steps, or --quick.

- states: a policy of 217 M parameters is loaded, learns in two steps and is saved, with 2 and 4 ranks of each sharded
  backend. Bytes are the largest unique set size of a rank (what would be free without it), beyond what the
  process had before it loaded anything.
- answers: one answer of up to 32,768 tokens, alone in its update, on ranks that share its tokens
  (learner.sequence_parallel). Bytes are those beyond the loaded learner. --width 256 takes a wider policy, --tokens
  32768 one length alone and --ranks 4 one number of ranks; figures that are there stay beside them.
- steps: a step of one rank, SmolLM2-135M and the quickstart's policy, over that of an earlier commit of this package
  in a worktree: medians of the ratios of rounds in which both take turns.

A process for each rank, joined over gloo, with a malloc that gives back freed blocks of 128 KiB and more; for answers,
of 16 KiB, so that figures are of memory in use. This package's own settings keep up to 2 GiB. Writes
benchmarks/results/sharding.{json,md} and sharding.png.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Annotated, Any, Literal, get_args

import lengths
import matplotlib

matplotlib.use("agg")
import numpy as np
import psutil
import torch
import torch.multiprocessing as mp
import typer
from matplotlib import pyplot as plt
from random_policy import shape_spec
from shared import RESULTS, ROOT, machine
from torch import distributed

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.batching import plan
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.planning.shapes import SHAPES, Shape
from qurl_ray.planning.workload import Workload
from qurl_ray.policy.load import StoredWeights, empty_model, load_model, unloaded_model
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.types import PolicySpec, Trajectory

Part = Literal["states", "answers", "steps"]
EARLIER = "5eb22c3"
"""The last commit without FSDP2 and shared sequences."""
STEP = (
    Path(__file__).with_name("random_policy.py").read_text()
    + """
import sys, tempfile, time
from pathlib import Path
import torch
from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.batching import plan
from qurl_ray.learner.learner import make_learner
from qurl_ray.planning.shapes import SHAPES
from qurl_ray.policy.load import empty_model
from qurl_ray.rl.objective import ObjectiveSettings
torch.set_num_threads(int(sys.argv[1]))
work = Workload(prompts=8, samples=1, updates=1, prompt=32, response=64, mean=64.0, micro_tokens=1024)
learners = {}
for line in sys.stdin:
    name = line.strip()
    if name not in learners:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            model = empty_model(shape_spec(SHAPES[name], work, Path(folder)))
        objective = ObjectiveSettings(clip_low=0.2, clip_high=0.28)
        learners[name] = make_learner(model, LearnerConfig(), objective, temperature=1.0, total_updates=1000)
    groups = [[trajectory(SHAPES[name], work, n)] for n in range(64 if name == "tiny" else 8)]
    share = plan(groups, updates=1, ranks=1, token_budget=1024, seed=0)[0]
    began = time.perf_counter()
    learners[name].learn(share)
    print(time.perf_counter() - began, flush=True)
"""
)
"""Program that reads names of shapes, and prints the seconds of a step of each."""
SIZES, ROUNDS = ("SmolLM2-135M", "tiny"), 9
STATES = replace(SHAPES["SmolLM2-135M"], name="217M", hidden=768, layers=24, heads=12, kv_heads=4, intermediate=2560)
BACKENDS: dict[str, dict[str, Any]] = {"fsdp": {"backend": "fsdp"}, "ZeRO 3": {"backend": "deepspeed", "zero_stage": 3}}
RANKS, LENGTHS, WIDTH = (1, 2, 4), (4096, 8192, 16384, 32768), 128
_EVERY_S = 0.01


class Watch:
    """Largest unique set size of this process since the last look, in bytes."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._most = self.now()
        threading.Thread(target=self._run, daemon=True).start()

    def now(self) -> int:
        return self._process.memory_full_info().uss

    def most(self) -> int:
        found = max(self._most, self.now())
        self._most = self.now()
        return found

    def _run(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            self._most = max(self._most, self.now())


def of_width(width: int) -> Shape:
    """Return the shape of the policy that long answers are measured with."""
    return replace(STATES, name=f"2 layers of {width}", hidden=width, layers=2, heads=4, kv_heads=4,
                   head_dim=width // 4, intermediate=3 * width, vocab=512)  # fmt: skip


def write_policy(shape: Shape, folder: Path) -> PolicySpec:
    """Write a policy with random weights to a folder."""
    work = Workload(prompts=1, samples=1, updates=1, prompt=8, response=max(LENGTHS), mean=8.0)
    spec = shape_spec(shape, work, folder)
    torch.manual_seed(0)
    empty_model(spec).save_pretrained(folder)
    return spec


def answer(shape: Shape, tokens: int, index: int = 0) -> Trajectory:
    rng = np.random.default_rng(index)
    return Trajectory(
        uid=str(index),
        prompt_ids=rng.integers(shape.vocab, size=8).astype(np.int32),
        token_ids=rng.integers(shape.vocab, size=tokens - 8).astype(np.int32),
        logprobs=np.full(tokens - 8, -float(np.log(shape.vocab)), dtype=np.float32),
        reward=1.0,
        advantage=1.0,
        versions=np.zeros(tokens - 8, dtype=np.int32),
        group=index,
    )


def learner_of(spec: PolicySpec, config: LearnerConfig) -> PolicyLearner:
    objective, sharded = ObjectiveSettings(clip_low=0.2, clip_high=0.28), config.backend == "fsdp"
    model = unloaded_model(spec) if sharded else load_model(spec)
    rows = StoredWeights(spec, model).rows if sharded else None
    return make_learner(model, config, objective, temperature=1.0, total_updates=10, rows=rows)


def of_states(rank: int, ranks: int, folder: Path, spec: PolicySpec, settings: dict[str, Any]) -> dict[str, float]:
    config = LearnerConfig(workers=ranks, tokens_per_micro_batch=128, **settings)
    shares = plan([[answer(STATES, 64, n)] for n in range(2 * ranks)], updates=2, ranks=ranks, token_budget=128, seed=0)
    watch = Watch()
    before, found = watch.now(), {}
    learner = learner_of(spec, config)
    found["load"] = watch.most() - before
    for _ in range(2):
        learner.learn(shares[rank])
    found["step"] = watch.most() - before
    found["between steps"] = watch.now() - before
    learner.save(folder)
    found["save"] = watch.most() - before
    return found


def of_answers(rank: int, ranks: int, folder: Path, spec: PolicySpec, settings: dict[str, Any]) -> dict[str, float]:
    config = LearnerConfig(workers=ranks, sequence_parallel=ranks, backend="fsdp")
    learner = learner_of(spec, config)
    shape = of_width(settings["width"])
    share = plan([[answer(shape, settings["tokens"])]], updates=1, ranks=1, token_budget=1, seed=0)[0]
    learner.learn(plan([[answer(shape, 64)]], updates=1, ranks=1, token_budget=1, seed=0)[0])  # states are there now
    watch = Watch()
    before, began = watch.now(), time.perf_counter()
    learner.learn(share)
    return {"bytes": watch.most() - before, "seconds": time.perf_counter() - began}


def _rank(rank: int, ranks: int, work: Callable[..., dict[str, float]], folder: Path, *arguments: Any) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = work(rank, ranks, folder, *arguments)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)  # gloo's threads may abort a process that shuts down


def on_ranks(ranks: int, work: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Return the largest figure of all ranks, by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "policy").mkdir()
        mp.spawn(_rank, (ranks, work, folder, *arguments), nprocs=ranks)
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {key: max(one[key] for one in found) for key in found[0]}


@contextmanager
def policy(shape: Shape) -> Iterator[PolicySpec]:
    with tempfile.TemporaryDirectory() as name:
        yield write_policy(shape, Path(name))


def limit(ranks: int) -> float:
    """Bytes that a rank with FSDP2 should not exceed, activations aside: its states, the largest module that is
    gathered, and a tenth."""
    return 1.1 * (16 * STATES.params / ranks + 4 * STATES.head_params)


def states(quick: bool) -> list[dict[str, Any]]:
    rows = []
    with policy(STATES) as spec:
        for name, settings in BACKENDS.items():
            for ranks in (2,) if quick else RANKS[1:]:
                rows.append({"backend": name, "ranks": ranks} | on_ranks(ranks, of_states, spec, settings))
                print(rows[-1], flush=True)
    return rows


def answers(lengths: Sequence[int], width: int, numbers_of_ranks: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    with policy(of_width(width)) as spec:
        for tokens in lengths:
            for ranks in numbers_of_ranks:
                settings = {"tokens": tokens, "width": width}
                rows.append({"ranks": ranks} | settings | on_ranks(ranks, of_answers, spec, settings))
                print(rows[-1], flush=True)
    return rows


def steps(quick: bool) -> list[dict[str, Any]]:
    with lengths.worktree(EARLIER) as tree, ExitStack() as stack:
        command = [sys.executable, "-c", STEP, str(os.cpu_count())]
        running = {
            place: stack.enter_context(
                subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, **lengths.in_tree(folder))
            )
            for place, folder in (("earlier", tree), ("now", ROOT))
        }
        rows = []
        for name in SIZES:
            seconds: dict[str, list[float]] = {place: [] for place in running}
            for _ in range(1 + (1 if quick else ROUNDS)):  # the first is no measurement
                for place, process in running.items():
                    print(name, file=process.stdin, flush=True)
                    seconds[place].append(float(process.stdout.readline()))
            ratios = [before / now for before, now in zip(seconds["earlier"][1:], seconds["now"][1:], strict=True)]
            rows.append({"shape": name, "ratios": ratios} | {p: statistics.median(s[1:]) for p, s in seconds.items()})
            print(rows[-1], flush=True)
        for process in running.values():
            process.stdin.close()
    return rows


def report(found: dict[str, Any]) -> str:
    lines = ["# Learners of several ranks", "", "`python benchmarks/sharding.py`"]
    lines += [f"- {part}: {one['machine']}" for part, one in found.items()]
    if "states" in found:
        lines += [
            "",
            f"{STATES.params / 1e6:.0f} M parameters, largest rank, GB beyond the process; in brackets bytes per "
            "parameter and share of a rank.",
            "",
            "| backend | ranks | load | two steps | between steps | save | limit, without activations |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in found["states"]["rows"]:
            each = STATES.params / row["ranks"]
            cells = [
                f"{row[key] / 1e9:.2f} ({row[key] / each:.1f})" for key in ("load", "step", "between steps", "save")
            ]
            bound = f"{limit(row['ranks']) / 1e9:.2f}" if row["backend"] == "fsdp" else ""
            lines.append(f"| {row['backend']} | {row['ranks']} | {' | '.join(cells)} | {bound} |")
    for part in (part for part in found if part.startswith("answers")):
        rows = found[part]["rows"]
        lines += [
            "",
            f"One answer, {of_width(rows[0]['width']).name}, 4 heads, fsdp: GB of the largest rank in use beyond the "
            "loaded learner.",
            "",
            "| tokens | " + " | ".join(f"{ranks} ranks | s | share" for ranks in RANKS) + " |",
            "|---|" + "---|---|---|" * len(RANKS),
        ]
        for tokens in sorted({row["tokens"] for row in rows}):
            of = {row["ranks"]: row for row in rows if row["tokens"] == tokens}
            cells = [
                f"{of[n]['bytes'] / 1e9:.3f} | {of[n]['seconds']:.0f} | {of[n]['bytes'] / of[1]['bytes']:.2f}"
                if n in of
                else " | | "
                for n in RANKS
            ]
            lines.append(f"| {tokens:,} | " + " | ".join(cells) + " |")
    if "steps" in found:
        lines += ["", f"A step of one rank, over that of {EARLIER}: more than 1 is faster now.", ""]
        lines += ["| policy | earlier, s | now, s | ratio |", "|---|---|---|---|"]
        for row in found["steps"]["rows"]:
            spread = f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
            ratio = f"{statistics.median(row['ratios']):.3f} ({spread})"
            lines.append(f"| {row['shape']} | {row['earlier']:.3f} | {row['now']:.3f} | {ratio} |")
    return "\n".join([*lines, ""])


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.6), dpi=150)
    for ranks in RANKS:
        chosen = [row for row in rows if row["ranks"] == ranks]
        label = f"{ranks} rank{'s' if ranks > 1 else ''}"
        axes.plot([r["tokens"] for r in chosen], [r["bytes"] / 2**30 for r in chosen], "o-", label=label)
    axes.set(xlabel="tokens of one answer", ylabel="GiB per rank, beyond the learner", ylim=(0, None))
    axes.set_xticks([r["tokens"] for r in rows if r["ranks"] == 1])
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main(
    only: Annotated[list[str] | None, typer.Option(help="parts: " + ", ".join(get_args(Part)))] = None,
    quick: Annotated[bool, typer.Option(help="one size of each, written nowhere")] = False,
    width: Annotated[int, typer.Option(help="of the policy that gives long answers")] = WIDTH,
    tokens: Annotated[list[int] | None, typer.Option(help="lengths of answers")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="numbers of ranks that share an answer")] = None,
) -> None:
    os.environ |= {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}  # of processes started here
    path = RESULTS / "sharding.json"
    found = json.loads(path.read_text()) if path.is_file() and not quick else {}
    chosen = only or get_args(Part)
    for part, work in (("states", states), ("steps", steps)):
        if part in chosen:
            found[part] = {"machine": machine(), "rows": work(quick)}
    if "answers" in chosen:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "16384"
        made = answers(tokens or (LENGTHS[:1] if quick else LENGTHS), width, ranks or RANKS)
        part, again = f"answers, width {width}", {(row["tokens"], row["ranks"]) for row in made}
        kept = [r for r in found.get(part, {"rows": []})["rows"] if (r["tokens"], r["ranks"]) not in again]
        rows = sorted(kept + made, key=lambda row: (row["tokens"], row["ranks"]))
        found[part] = {"machine": machine(), "rows": rows}
    print(report(found))
    if quick:
        return
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(report(found))
    if part := found.get(f"answers, width {WIDTH}"):
        draw(part["rows"], path.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
