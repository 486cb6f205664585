"""The papers' tables at the size of a laptop: python benchmarks/reproduce.py [TABLE ...] --seeds 3, or --render.

Every cell, a table's row with one seed, is a job of its own (cells.py), and is kept: the same command resumes where it
was stopped. Cells that were not run are printed as such. In each table, all rows run with the first seed first. Tables
are written beside the papers' own to benchmarks/results/reproduce.{json,md}, curves to reproduce_*.png.

The policy has 2.4 M parameters and adds two-digit numbers. Every seed starts from the same cold start: seeds differ in
what reinforcement learning draws, and a spread over cold starts would be wider (benchmarks/quickstart.py). Formats:
INT8; FP8; INT4 in groups of 128; in such groups also "seven levels", codes of -3 to 3, and "coarse", codes of -1, 0, 1,
where KL(b‖p) and max rho exceed what the papers see late in long runs. As in the papers' recipes the dual clip is 10,
and 3 in PPO. Longer answers belong to another task (`long_task`).
"""

import json
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import frozen
import typer
from cells import Arm, Cell, cell, draw_series
from matplotlib import pyplot as plt
from shared import RESULTS, ROOT, machine

FULL = ("rollout.quantization=none", "quantization.uaq_scale=1", "algorithm.correction=ignore")
FORMATS = {
    "INT8": ("rollout.quantization=int8",),
    "FP8": ("rollout.quantization=fp8",),
    "INT4": ("rollout.quantization=int4",),
    "seven levels": ("rollout.quantization=int4", "quantization.weight_max_code=3"),
    "coarse": ("rollout.quantization=int4", "quantization.weight_max_code=1"),
}
CORRECTIONS = {
    "naive": ("algorithm.correction=naive", "#D55E00"),
    "FlashRL (TIS)": ("algorithm.correction=flashrl", "#E69F00"),
    "QuRL (ACR)": ("algorithm.correction=qurl", "#0072B2"),
}
NO_UAQ = "quantization.uaq_scale=1"
CELL = (
    "evaluation.problems=1620",  # all held-out problems
    "rollout.prompts_per_step=64",
    "rollout.samples_per_prompt=8",
    "learner.lr=4e-5",
    "learner.warmup_steps=0",
    "checkpoint.every=0",
    "rollout.threads=1",
    "learner.threads=1",
    "sync.delta=false",  # encoding a delta of float32 values takes half as long as the rest of the step
)
FREE = (*CELL, "guard.enabled=false")
SMALL = (*FREE, "rollout.prompts_per_step=32", "algorithm.max_refill_rounds=2", "algorithm.dual_clip=10")
_PLACES = ("initial_policy", "mlflow_run_id")
DIGITS = (8, 16, 32)
"""Answer lengths of the table of long answers, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table: its rows, their common settings, and the paper's figures."""

    title: str
    common: tuple[str, ...]
    arms: tuple[Arm, ...]
    paper: dict[str, str]
    """Figures of the paper, by name of the row."""
    note: str
    """Source of the paper's figures, as Markdown."""
    config: str = "qurl_ray/configs/quickstart.yaml"
    job: str = "qurl_dapo"
    curves: dict[str, str] | None = None
    """Metrics of steps to draw, with their labels."""


def formats(corrections: dict[str, tuple[str, str]], *names: str, uaq: bool = False) -> tuple[Arm, ...]:
    """Return full precision, and each correction in each format; with `uaq`, the last one also with s = 1.5."""
    arms = [Arm(name="full precision", settings=FULL, color="#777777")]
    for name in names:
        for label, (correction, color) in corrections.items():
            arms.append(Arm(name=f"{name} {label}", settings=(*FORMATS[name], correction, NO_UAQ), color=color))
        if uaq:
            settings = (*FORMATS[name], correction, "quantization.uaq_scale=1.5")
            arms.append(Arm(name=f"{name} {label} and UAQ", settings=settings, color="#009E73"))
    return tuple(arms)


def uaq_arms() -> tuple[Arm, ...]:
    return tuple(
        Arm(
            name=f"s = {s:g}, lr × {lr:g}",
            settings=(f"quantization.uaq_scale={s:g}", f"learner.lr={4e-5 * lr:g}"),
            color="#0072B2",
        )
        for s, lr in product((1, 1.5, 2), (1, 1.5, 2))
    )


def long_arms() -> tuple[Arm, ...]:
    """Return for each length: full precision, and FP8 blocks and seven levels, each in rollouts alone and unified."""
    flows = {"full precision": (*FULL, "precision_flow=rollout_only")}
    for name, form in {"FP8": ("rollout.quantization=fp8_block",), "seven levels": FORMATS["seven levels"]}.items():
        for flow, setting in {"rollouts alone": "rollout_only", "unified": "unified"}.items():
            flows[f"{name}, {flow}"] = (*form, f"precision_flow={setting}", NO_UAQ)
    colors = dict(zip(flows, ("#777777", "#E69F00", "#56B4E9", "#D55E00", "#0072B2"), strict=True))
    return tuple(
        Arm(
            name=f"{digits} tokens, {flow}",
            settings=(*settings, *long_task(digits)),
            color=colors[flow],
            base=f"{digits} tokens, full precision",
        )
        for digits in DIGITS
        for flow, settings in flows.items()
    )


def long_task(digits: int) -> tuple[str, ...]:
    """Settings of a task of running sums of digits, modulo 10: each digit of the answer needs the one before."""
    return (
        "task.type=dataset",
        f"task.path={_long_path(digits)}",
        "task.prompt_column=prompt",
        "task.answer_column=answer",
        "task.reward=exact",
        f"rollout.max_new_tokens={digits + 1}",
        f"model.max_length={2 * digits + 4}",
    )


def _long_path(digits: int) -> Path:
    return ROOT / "runs" / f"running-sums-{digits}.jsonl"


def write_long_task(digits: int) -> None:
    """Write the problems of the long task, unless the file exists."""
    path = _long_path(digits)
    if path.exists():
        return
    draw, rows = random.Random(digits), []
    for _ in range(8000):
        given = [draw.randrange(10) for _ in range(digits)]
        sums = [sum(given[: i + 1]) % 10 for i in range(digits)]
        rows.append({"prompt": "".join(map(str, given)) + "=", "answer": "".join(map(str, sums))})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_whole(path: Path, text: str) -> None:
    """Write the file completely or not at all, because it counts as done once it exists."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


ONE_EACH = (
    "algorithm.type=ppo",
    "algorithm.dual_clip=3",
    "algorithm.critic_lr=1e-4",
    "algorithm.updates_per_rollout=4",
    "rollout.samples_per_prompt=1",
    "rollout.prompts_per_step=256",
)
TABLES = {
    "dapo": Table(
        title="DAPO, with and without UAQ",
        common=(*SMALL, "steps=80", "learner.lr=8e-5", "learner.lr_final_share=1"),
        arms=formats(CORRECTIONS, "INT8", "INT4", "coarse", uaq=True),
        paper={
            "full precision": "31.67",
            "INT8 naive": "0.001",
            "INT8 FlashRL (TIS)": "30.29",
            "INT8 QuRL (ACR)": "30.63",
            "INT8 QuRL (ACR) and UAQ": "31.25",
        },
        note="The paper's: QuRL, DAPO, Qwen2.5-Math-7B, AIME24 avg@32 %.",
    ),
    "preset": Table(
        title="The preset of the quickstart, 160 steps",
        common=(*CELL, "steps=160"),
        arms=(
            Arm(name="full precision", settings=FULL, color="#777777"),
            Arm(name="INT8 QuRL (ACR)", settings=(NO_UAQ,), color="#0072B2"),
            Arm(name="INT8 QuRL (ACR) and UAQ", settings=(), color="#009E73"),
        ),
        paper={"full precision": "31.67", "INT8 QuRL (ACR)": "30.63", "INT8 QuRL (ACR) and UAQ": "31.25"},
        note="The paper's: QuRL, DAPO, Qwen2.5-Math-7B, AIME24 avg@32 %.",
    ),
    "collapse": Table(
        title="Collapse: a long run with coarse codes",
        common=(*SMALL, *FORMATS["coarse"], NO_UAQ, "steps=150", "learner.lr_final_share=1"),
        arms=tuple(
            Arm(name=label, settings=(setting,), color=color) for label, (setting, color) in CORRECTIONS.items()
        ),
        paper={
            "naive": "collapses within a few steps",
            "FlashRL (TIS)": "collapses after about 1000",
            "QuRL (ACR)": "stable to 1200",
        },
        note="The paper's: QuRL, INT8. KL(b‖p) 0.002 → 0.025, max ρ to 1e5; naive's clipped share first 1.5 %, then 0.",
        curves={
            "reward/mean": "reward of the rollouts",
            "mismatch/kl": "KL(b‖p)",
            "mismatch/max_rho": "max rho",
            "clip/upper": "clipped above, share of tokens",
        },
    ),
    "uaq": Table(
        title="UAQ ablation, INT4, ACR",
        common=(*SMALL, *FORMATS["INT4"], "algorithm.correction=qurl", "steps=80", "learner.lr_final_share=1"),
        arms=uaq_arms(),
        paper={
            "s = 1, lr × 1": "30.63",
            "s = 1.5, lr × 1": "31.25",
            "s = 2, lr × 1": "29.15",
            "s = 1, lr × 1.5": "29.06",
            "s = 1, lr × 2": "26.66",
        },
        note="The paper's: QuRL, DAPO, INT8, AIME24 avg@32 %. The rate here is that of all weights; the control of s "
        "times the rate on the folded ones alone, without a fold, is in the table of the frozen actor.",
    ),
    "ppo": Table(
        title="PPO, with a value model",
        job="qurl_ppo",
        common=(*FREE, *ONE_EACH, "steps=60", "learner.lr=8e-5", "learner.lr_final_share=1"),
        arms=formats(CORRECTIONS, "INT8", "FP8", "coarse"),
        paper={
            "full precision": "55.35",
            "INT8 naive": "48.78",
            "INT8 FlashRL (TIS)": "51.40",
            "INT8 QuRL (ACR)": "53.55",
            "FP8 naive": "0.0",
            "FP8 FlashRL (TIS)": "53.60",
            "FP8 QuRL (ACR)": "54.28",
        },
        note="The paper's: QuRL, PPO, Qwen2.5-0.5B-Instruct, GSM8K %.",
    ),
    "jet": Table(
        title="Jet-RL: rollouts alone and unified, as answers get longer",
        common=(
            *SMALL,
            "rollout.prompts_per_step=16",
            "algorithm.correction=ignore",
            "steps=20",
            "learner.lr=8e-5",
            "learner.lr_final_share=1",
        ),
        arms=long_arms(),
        paper={},
        note="The paper's: FP8 in rollouts alone is fine to 4K tokens, worse at 8K, and collapses within 20 steps at "
        "16K. Jet-RL, Llama3.1-8B, 8K, mean of its tasks: BF16 23.2, rollouts alone 13.0, unified 25.2.",
    ),
}


def spread(values: Sequence[float]) -> str:
    """Return the mean and the values of the seeds, in percent."""
    each = " · ".join(f"{100 * value:.1f}" for value in values)
    return f"{100 * statistics.mean(values):.1f} ({each})"


def rows(table: Table, cells: dict[str, list[Cell]]) -> list[str]:
    """Return a Markdown table; a row without any run says "not run"."""
    lines = [
        "| | before % | after %: mean (seeds) | of the gain in full precision % | in its format % | KL(b‖p), largest | "
        "max ρ | kept by ACR, tokens | the paper's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in table.arms:
        published = table.paper.get(arm.name, "")
        if not (found := cells[arm.name]):
            lines.append(f"| {arm.name} | not run | | | | | | | {published} |")
            continue
        after = [one.summary["accuracy_after"] for one in found]
        kl = max(max(v for v in one.series("mismatch/kl") if not math.isnan(v)) for one in found)
        base = gain(cells.get(arm.base, []))
        of_full = f"{100 * gain(found) / base:.0f}" if base > 0 else ""
        lines.append(
            f"| {arm.name} | {100 * found[0].summary['accuracy_before']:.1f} | {spread(after)} | {of_full} | "
            f"{100 * statistics.mean(one.summary['accuracy_after_quantized'] for one in found):.1f} | {kl:.2g} | "
            f"{max(one.summary['max_rho'] for one in found):.3g} | "
            f"{sum(one.summary['acr_active_tokens'] for one in found):,} | {published} |"
        )
    return lines


def gain(cells: Sequence[Cell]) -> float:
    """Mean gain of accuracy during training; 0 without cells."""
    return statistics.mean(c.summary["accuracy_after"] - c.summary["accuracy_before"] for c in cells) if cells else 0.0


def draw(table: Table, cells: dict[str, list[Cell]], path: Path) -> None:
    shown = {name: found for name, found in cells.items() if found}
    figure, axes = plt.subplots(1, len(table.curves), figsize=(4 * len(table.curves), 3.4), constrained_layout=True)
    for axis, (key, label) in zip(axes, table.curves.items(), strict=True):
        draw_series(axis, table.arms, shown, key, width=5)
        axis.set_title(label)
        if key.startswith("mismatch/"):
            axis.set_yscale("log")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def kept(table: Table, one: Cell) -> dict:
    """Return the part of a cell that goes into the JSON file."""

    def numbers(key: str) -> list[float | None]:  # JSON has no nan
        return [None if math.isnan(value) else value for value in one.series(key)]

    series = {"series": {key: numbers(key) for key in table.curves}} if table.curves else {}
    return {key: value for key, value in one.summary.items() if key not in _PLACES} | series


def frozen_actor(seeds: int, until: float, runs: Path, picture: Path) -> tuple[list[str], list[dict]]:
    """Run frozen.py's cells, one for each seed, and return their text and figures."""
    cells = []
    for seed in range(seeds):
        path = runs / f"frozen-{seed}.json"
        if time.monotonic() < until and not path.exists():
            since = time.monotonic()
            figures = frozen.measure(seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"figures": figures, "seconds": time.monotonic() - since}))
        if path.exists():
            cells.append(json.loads(path.read_text()))
    text = ["## The frozen actor", ""]
    if not cells:
        return [*text, "not run", ""], []
    found = [cell["figures"] for cell in cells]
    frozen.draw(found, picture)
    minutes = sum(cell["seconds"] for cell in cells) / 60
    text += [*frozen.rows(found), "", f"{len(cells)} of {seeds} cells, {minutes:.0f} minutes.", ""]
    return [*text, f"![The frozen actor]({picture.name})", ""], found


def run(key: str, seeds: int, jobs: int, until: float, runs: Path) -> list[tuple[Arm, Cell]]:
    """Run the cells of a table, and return those that have run, in the order of seeds, then arms."""
    table = TABLES[key]
    wanted = list(product(range(seeds), table.arms))

    def one(seed: int, arm: Arm) -> Cell | None:
        began = time.monotonic()
        where = (key, table.config, table.common, arm, seed, runs.resolve())
        found = cell(*where, job=table.job, begin=began < until, quiet=True)
        if (seconds := time.monotonic() - began) > 1 and found:  # else it existed before
            accuracy = 100 * found.summary["accuracy_after"]
            place = wanted.index((seed, arm)) + 1
            left = (len(wanted) - place) * seconds / jobs / 60
            what = f"{arm.name}, seed {seed}: {accuracy:.1f} % after {seconds:.0f} s"
            print(f"{key} {place} of {len(wanted)}: {what}; about {left:.0f} min left", flush=True)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(one, *zip(*wanted, strict=True)))
    return [(arm, cell) for (_, arm), cell in zip(wanted, found, strict=True) if cell]


def main(
    tables: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(TABLES)}, frozen; all if absent.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each row.")] = 3,
    minutes: Annotated[float, typer.Option(help="Begin no cell after so long.")] = float("inf"),
    render: Annotated[bool, typer.Option(help="Run nothing: tables of what is there.")] = False,
    jobs: Annotated[int, typer.Option(help="Cells at a time, with a core each.")] = os.cpu_count() or 1,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = ROOT / "runs" / "reproduce",
    out: Annotated[Path, typer.Option(help="The JSON file; the rest goes beside it.")] = RESULTS / "reproduce.json",
) -> None:
    """Run the papers' tables, and print them beside the papers' own figures."""
    until = 0.0 if render else time.monotonic() + 60 * minutes
    for digits in () if render else DIGITS:
        write_long_task(digits)
    figures, text = (
        {},
        ["# The papers' tables", "", f"`python benchmarks/reproduce.py --seeds {seeds}`; {machine()}", ""],
    )
    for key in TABLES:
        table, cells = TABLES[key], {arm.name: [] for arm in TABLES[key].arms}
        for arm, one in run(key, seeds, jobs, until if not tables or key in tables else 0.0, runs):
            cells[arm.name].append(one)
        seconds = [one.summary["train_seconds"] for found in cells.values() for one in found]
        text += [f"## {table.title}", "", *rows(table, cells), "", table.note, ""]
        text += [
            f"{len(seconds)} of {seeds * len(table.arms)} cells, {sum(seconds) / 60:.0f} minutes of steps, at most "
            f"{max(seconds, default=0):.0f} s in a cell.",
            "",
        ]
        if table.curves and seconds:
            draw(table, cells, out.with_name(f"reproduce_{key}.png"))
            text += [f"![{table.title}](reproduce_{key}.png)", ""]
        figures[key] = {name: [kept(table, one) for one in found] for name, found in cells.items()}
    asked = not tables or "frozen" in tables
    more, figures["frozen"] = frozen_actor(seeds, until if asked else 0.0, runs, out.with_name("reproduce_frozen.png"))
    text += more
    print("\n".join(text))
    out.write_text(json.dumps(figures | {"machine": machine()}, indent=2) + "\n")
    out.with_suffix(".md").write_text("\n".join(text))


if __name__ == "__main__":
    typer.run(main)
