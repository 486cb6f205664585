"""Is the quickstart the same everywhere? python benchmarks/quickstart.py (about an hour), or with fewer --models.

Runs the quickstart as a user does, with its cold start, for several cold starts (`model.seed`) and several runs of each
(`seed`), on this CPU with all its instructions and with those of AVX2 alone. Shows the spread of the accuracies before
and after training, and how the seconds of each run are spent. A finished cell is kept in `--runs`: the same command
runs only missing cells. Writes benchmarks/results/quickstart.{json,md}.

`start` is the time from the command to the first evaluation, without the cold start; `steps` is from there to the last
step and its evaluation; `end` is the rest: the last evaluations, the export, the report and the shutdown.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from shared import RESULTS, ROOT, machine

CPUS = {"all": {}, "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}}
"""Environment variables of the run, which select the instructions that torch's and oneDNN's kernels may use."""
PARTS = ("cold start", "start", "steps", "end")
ACCURACIES = {"before": "accuracy_before", "after": "accuracy_after", "after, INT8": "accuracy_after_quantized"}


def cell(cpu: str, model_seed: int, seed: int, runs: Path) -> dict[str, Any]:
    """Return the figures of one run, which is started if they are missing, always with its own cold start."""
    name = f"{cpu}-{model_seed}-{seed}"
    kept = runs / f"{name}.json"
    if not kept.exists():
        cache = runs / f"{name}.cache"
        shutil.rmtree(cache, ignore_errors=True)
        settings = [f"model.seed={model_seed}", f"seed={seed}", f"name={name}", f"output_dir={runs}"]
        job = [sys.executable, "jobs/qurl_dapo.py", "--config", "qurl_ray/configs/quickstart.yaml", "--fresh"]
        environment = os.environ | CPUS[cpu] | {"QURL_CACHE": str(cache)}
        runs.mkdir(parents=True, exist_ok=True)
        began = time.time()
        with (runs / f"{name}.log").open("w") as log:
            subprocess.run([*job, *settings], cwd=ROOT, env=environment, stdout=log, stderr=log, check=True)
        found = figures(runs / name, began, time.time())
        shutil.rmtree(cache)
        part = kept.with_suffix(".part")
        part.write_text(json.dumps({"cpu": cpu, "model_seed": model_seed, "seed": seed} | found))
        part.rename(kept)  # the cell counts as done once this file exists
    return json.loads(kept.read_text())


def figures(run_dir: Path, began: float, ended: float) -> dict[str, Any]:
    """Return accuracies, steps and seconds of a finished run; `began` and `ended` are Unix times of its command."""
    summary = json.loads((run_dir / "summary.json").read_text())
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    cold = [seconds[1] for e in events if (seconds := re.fullmatch(r"cold start: .*, (\d+) s", e.get("message") or ""))]
    first = next(e["time"] for e in events if e["kind"] == "evaluation")
    last = max(e["time"] for e in events if e["kind"] == "step" or e.get("message") == "during")
    seconds = {"cold start": float(cold[-1]), "steps": last - first, "end": ended - last, "in all": ended - began}
    seconds["start"] = first - began - seconds["cold start"]
    accuracies = {label: summary[key] for label, key in ACCURACIES.items()}
    reached = summary["target_reached_at_step"] is not None
    return {"accuracy": accuracies, "steps": summary["steps"], "reached": reached, "seconds": seconds}


def table(cells: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table: a row for each run, and the least and the most of each column."""
    columns = [*(f"{label} %" for label in ACCURACIES), "steps", *(f"{part}, s" for part in (*PARTS, "in all"))]
    numbers = [[*row(one)] for one in cells]
    lines = [f"| CPU | model.seed | seed | target reached | {' | '.join(columns)} |", "|---" * (4 + len(columns)) + "|"]
    for one, values in zip(cells, numbers, strict=True):
        first = f"| {one['cpu']} | {one['model_seed']} | {one['seed']} | {'yes' if one['reached'] else 'no'} | "
        lines.append(first + " | ".join(f"{value:g}" for value in values) + " |")
    spans = (f"{min(values):g} to {max(values):g}" for values in zip(*numbers, strict=True))
    return [*lines, f"| least to most | | | | {' | '.join(spans)} |"]


def row(one: dict[str, Any]) -> Iterator[float]:
    """Yield the numbers of a run, in percent, steps and seconds."""
    for label in ACCURACIES:
        yield round(100 * one["accuracy"][label], 1)
    yield one["steps"]
    for part in (*PARTS, "in all"):
        yield round(one["seconds"][part])


def main(
    models: Annotated[int, typer.Option(help="Values of model.seed.")] = 5,
    seeds: Annotated[int, typer.Option(help="Values of seed, for each of them.")] = 2,
    cpus: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CPUS)}; all of these if absent.")] = None,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = ROOT / "runs" / "quickstarts",
    out: Annotated[Path, typer.Option(help="The JSON file; the table goes beside it.")] = RESULTS / "quickstart.json",
) -> None:
    """Run the quickstart from several seeds, on several kinds of CPU."""
    cells = []
    for seed, model_seed, cpu in product(range(seeds), range(models), cpus or CPUS):
        cells.append(cell(cpu, model_seed, seed, runs.resolve()))
        print(table(cells)[-2], flush=True)
    text = ["# The quickstart, from several seeds", "", f"`python benchmarks/quickstart.py`; {machine()}", ""]
    text += [*table(cells), ""]
    out.write_text(json.dumps({"cells": cells, "machine": machine()}, indent=2) + "\n")
    out.with_suffix(".md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    typer.run(main)
