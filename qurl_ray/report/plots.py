"""Charts of a run as .svg files: those of the report, for use outside it."""

import re
from pathlib import Path

from qurl_ray.report.catalog import groups
from qurl_ray.report.charts import standalone
from qurl_ray.runs.files import read_run
from qurl_ray.runs.values import flatten


def plots(run_dir: Path) -> dict[str, str]:
    """Return {"held-out-problems-solved.svg": its text, …}, without charts for which the run recorded no values."""
    record = read_run(run_dir)
    drawings = {}
    for group in groups(record, dict(flatten(record.config, "."))):
        for chart, rows in group.charts:
            drawing = standalone(chart, rows)
            if drawing is not None:
                name = re.sub(r"[^a-z0-9]+", "-", chart.title.lower().replace("‖", "-")).strip("-")
                drawings[f"{name}.svg"] = drawing
    return drawings
