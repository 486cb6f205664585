"""Cost of the certificate in the quickstart, and the bound that it gives: python benchmarks/certificate.py (5 minutes).

Runs the quickstart with `evaluation.certificate.every`. A certificate's seconds are its answers and gradients
(`time/certificate`), the sync of full-precision weights included, and what the sync after it takes above the median of
the other steps': it sends all weights. The share of the time is of medians. Results are in
benchmarks/results/certificate.json.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from shared import RESULTS, ROOT, Figures

from qurl_ray.config import load_config
from qurl_ray.runs.files import read_run
from qurl_ray.training.driver.run import run


def figures(run_dir: Path) -> dict[str, Any]:
    """Return cost and bounds of a run's certificates."""
    rows = [{key: value or 0.0 for key, value in values.items()} for _, values in read_run(run_dir).rows]
    made = [values for values in rows if "certificate/pairs" in values]
    others = [values for values in rows if "certificate/pairs" not in values]
    usual = statistics.median(values["time/sync"] for values in others)
    seconds = [values["time/certificate"] + values["time/sync"] - usual for values in made]
    step = statistics.median(values["time/step"] for values in others)
    certificate = statistics.median(seconds)
    return {
        "steps": len(rows),
        "median step without a certificate, s": step,
        "seconds of each certificate": [round(value, 3) for value in seconds],
        "share of the time at k = 20": certificate / (20 * step + certificate),
        "certificates": [
            {key.removeprefix("certificate/"): value for key, value in values.items() if key.startswith("certificate/")}
            for values in made
        ],
    }


def main(
    every: Annotated[int, typer.Option(help="Steps between two certificates.")] = 20,
    settings: Annotated[list[str] | None, typer.Argument(help="Further settings of the run.")] = None,
    beside: Annotated[bool, typer.Option(help="Note that other programs use the machine.")] = False,
    out: Annotated[Path, typer.Option(help="The JSON file.")] = RESULTS / "certificate.json",
) -> None:
    """Run the quickstart with certificates, and keep their cost and bounds."""
    with tempfile.TemporaryDirectory() as folder:
        given = [f"evaluation.certificate.every={every}", f"output_dir={folder}", "tracking.mlflow=false"]
        result = run(load_config(ROOT / "qurl_ray" / "configs" / "quickstart.yaml", [*given, *(settings or [])]))
        found = figures(result.run_dir)
    kept = Figures(out)
    kept.keep("timed beside other programs", beside)
    kept.keep(f"every {every} steps", found)
    last = found["certificates"][-1]
    print(
        f"at 95 %, INT8 costs at most {last['cost_most']:.4f} of reward ({last['pairs']:.0f} pairs); certificates take "
        f"{found['share of the time at k = 20']:.1%} of the steps' time at k = 20"
    )


if __name__ == "__main__":
    typer.run(main)
