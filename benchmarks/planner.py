"""The planner against published figures, and --measure against runs: python benchmarks/planner.py (about 10 minutes).

Writes benchmarks/results/planner.json and planner.md. `--no-runs` leaves out the runs. The machine is measured before
and after each run, and the mean of the two predictions is compared with the run's own phase times. Lengths of answers,
and the share of groups that dynamic sampling kept, are those of the run. Nothing else should use the machine during
this time.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from shared import RESULTS, machine

from qurl_ray.config.load import load_config
from qurl_ray.planning.measure import Machine, measure
from qurl_ray.planning.published import SOURCES, Point, fitted_points, points
from qurl_ray.planning.shapes import configured_shape
from qurl_ray.planning.show import as_point, figure
from qurl_ray.planning.workload import Workload, configured_workload

ROOT = Path(__file__).parents[1]
RUNS = {
    "quickstart": {"steps": 24, "prompt": 6, "mean": 3.6, "kept": 0.85},
    "smollm2_135m": {"steps": 5, "prompt": 36, "mean": 13.0, "kept": 0.3},
}
"""Number of steps that are run, and their approximate workload, which the measurement before a run uses."""
PHASES = ("rollout", "logprob", "update", "sync")
_WARM = 1  # warm-up steps, which do not count


def run(preset: str, steps: int, folder: Path) -> list[dict[str, float]]:
    """Run a preset, and return the metrics of each step that counts."""
    command = [
        sys.executable,
        "jobs/qurl_dapo.py",
        "--config",
        f"jobs/configs/{preset}.yaml",
        "--fresh",
        f"steps={steps + _WARM}",
        f"output_dir={folder}",
        "tracking.mlflow=false",
        "tracking.console=plain",
        "evaluation.problems=1",
        "evaluation.every=0",
        "evaluation.target_reward=null",
        "checkpoint.every=0",
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / preset / "metrics.jsonl").read_text().splitlines()
    found = [event["values"] for event in map(json.loads, lines) if event["kind"] == "step"]
    return found[_WARM:]


def compare(preset: str, folder: Path) -> dict[str, Any]:
    """Return predicted and measured seconds of a step's phases, in INT8."""
    config, about = load_config(ROOT / "jobs" / "configs" / f"{preset}.yaml"), RUNS[preset]
    shape = configured_shape(config.model)
    guess = {"prompt": about["prompt"], "mean": about["mean"], "kept": about["kept"]}
    work = replace(configured_workload(config), **guess)
    found = [measure(shape, work)]
    steps = run(preset, about["steps"], folder)
    found.append(measure(shape, work))
    real = as_drawn(work, steps)
    predicted = {name: statistics.mean(one.phases(real, "int8")[name] for one in found) for name in PHASES}
    measured = {name: statistics.median(step[f"time/{name}"] for step in steps) for name in PHASES}
    return {
        "preset": preset,
        "steps": len(steps),
        "lengths": {"prompt": real.prompt, "mean": real.answer, "kept": real.kept},
        "predicted": predicted,
        "measured": measured,
        "error": {name: predicted[name] / measured[name] - 1 for name in PHASES},
        "share": {name: measured[name] / sum(measured.values()) for name in PHASES},
        "before_over_after": drift(found, real),
        "measuring_s": [one.seconds for one in found],
        "predicted_float32": {
            name: statistics.mean(one.phases(real, "none")[name] for one in found) for name in PHASES
        },
    }


def as_drawn(work: Workload, steps: list[dict[str, float]]) -> Workload:
    """Return `work` with the lengths of answers, and the share of samples that was kept, of these steps."""
    samples = statistics.mean(step["rollout/samples"] for step in steps)
    mean = statistics.mean(step["rollout/mean_length"] for step in steps)
    return replace(work, mean=min(float(work.response), mean), kept=min(1.0, work.sequences / samples))


def drift(found: list[Machine], work: Workload) -> float:
    """Ratio of the machine's predicted step time before the run to that after it."""
    before, after = (sum(one.phases(work, "int8").values()) for one in found)
    return before / after


def within(share: float, answers: int) -> list[bool]:
    """Return for each figure that was not fitted whether the prediction is within 15 %.

    Args:
        share: mean length of an answer over its limit.
        answers: answers that an engine draws at a time.
    """
    return [abs(point.error()) <= 0.15 for point in points(share, answers) if not point.fitted]


def sensitivity() -> list[str]:
    """Return a Markdown table of how much the result depends on values that the sources leave out."""
    counts = (64, 128, 256)
    lines = ["| mean, of the limit | " + " | ".join(f"{count} answers an engine" for count in counts) + " |"]
    lines.append("|" + "---|" * (1 + len(counts)))
    for share in (0.15, 0.25, 0.35, 0.5):
        found = [within(share, count) for count in counts]
        lines.append(f"| {share:g} | " + " | ".join(f"{sum(one)} of {len(one)}" for one in found) + " |")
    return lines


def markdown(rows: list[Point], runs: list[dict[str, Any]], where: str) -> str:
    lines = ["# The planner", "", "`python benchmarks/planner.py`", "", where, ""]
    lines += ["| source | figure | published | planner | error |", "|---|---|---|---|---|"]
    for point in rows:
        name = point.what + (" (fitted)" if point.fitted else "")
        published, planner = figure(point)
        lines.append(f"| {point.source} | {name} | {published} | {planner} | {point.error():+.0%} |")
    fitted = [abs(point.error()) for point in fitted_points()]
    others = [abs(point.error()) for point in rows if not point.fitted]
    lines += [
        "",
        f"{len(fitted)} decode steps that the constants were fitted to: mean error {statistics.mean(fitted):.1%}, "
        f"largest {max(fitted):.1%}. Of {len(others)} figures not fitted {sum(e <= 0.15 for e in others)} are within "
        "15 %:",
        "",
        *sensitivity(),
        "",
        *(f"- {name}: {text}" for name, text in SOURCES.items()),
    ]
    for one in runs:
        lines += [
            "",
            f"| {one['preset']}, s of a step | predicted | measured | error | of the step |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {one['predicted'][name]:.3f} | {one['measured'][name]:.3f} | {one['error'][name]:+.0%} "
            f"| {one['share'][name]:.0%} |"
            for name in PHASES
        ]
        lines.append(
            f"\nMedians of {one['steps']} steps. Measuring took {one['measuring_s'][0]:.0f} s before and "
            f"{one['measuring_s'][1]:.0f} s after; before was {one['before_over_after']:.2f} times as slow as after."
        )
    return "\n".join(lines) + "\n"


def main(
    runs: Annotated[bool, typer.Option(help="Compare --measure with runs.")] = True,
    only: Annotated[list[str] | None, typer.Option(help="Presets to run; all if absent.")] = None,
) -> None:
    """Compare the planner with published figures and with runs; write benchmarks/results/planner.{json,md}."""
    with tempfile.TemporaryDirectory(prefix="planner-") as folder:
        compared = [compare(preset, Path(folder)) for preset in only or RUNS] if runs else []
    rows = points()
    RESULTS.mkdir(exist_ok=True)
    values = {
        "machine": machine(),
        "fitted_steps": [as_point(point) for point in fitted_points()],
        "points": [as_point(point) for point in rows],
        "runs": compared,
    }
    (RESULTS / "planner.json").write_text(json.dumps(values, indent=2) + "\n")
    (RESULTS / "planner.md").write_text(markdown(rows, compared, machine()))
    Console().print((RESULTS / "planner.md").read_text(), highlight=False)


if __name__ == "__main__":
    typer.run(main)
