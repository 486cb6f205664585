"""Comparison of runs as a page, and as a table for the console."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from qurl_ray.report import catalog
from qurl_ray.report.charts import Chart, Panel, Series, draw
from qurl_ray.report.compare import Comparison, Run, clipped
from qurl_ray.report.page import render_page
from qurl_ray.report.text import one_line
from qurl_ray.runs.values import StepValues

_COLORS = 8
_OVERLAID = (
    "reward/mean",
    "mismatch/kl",
    "mismatch/max_rho",
    "mismatch/ess",
    "policy/entropy",
    "rollout/mean_length",
    "rollout/tokens_per_second",
    "grad_norm",
)
"""Metrics for which the report's chart is drawn with a line for every run."""
_CLIPPED = Chart(
    "Clipped tokens",
    "Tokens whose gradient the clip removes, because the policy has moved too far.",
    (Panel((), "of all tokens", percent=True, zero=True),),
)
_SECONDS = Chart("Time", "Wall time of a step.", (Panel((), "s per step", zero=True),))
_CELL_CHARACTERS = 200
"""Largest number of characters in a cell of the console table."""


def render_comparison(comparison: Comparison, title: str) -> str:
    """Return the page's text: tables, charts with a line for every run, and the settings that differ."""
    runs = comparison.runs
    cards = [
        {"title": chart.title, "reading": chart.reading, "drawing": drawing}
        for chart, rows in _charts(runs)
        if (drawing := draw(chart, rows)) is not None
    ]
    return render_page(
        "compare.html.j2",
        styles=("page.css.j2", "report.css.j2", "compare.css.j2"),
        title=title,
        runs=[{"name": run.name, "color": _color(i), "dashed": _dashed(i)} for i, run in enumerate(runs)],
        warnings=comparison.warnings,
        tables=comparison.tables,
        settings=comparison.settings,
        cards=cards,
    )


def console_table(comparison: Comparison) -> Table:
    """Return the tables and the differing settings for the console. Untrusted names are shown as plain text."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, header_style="bold", pad_edge=False)
    table.add_column("", overflow="fold")
    for run in comparison.runs:
        table.add_column(_text(run.name), overflow="fold")
    for title, measures in (comparison.tables | {"Settings that differ": comparison.settings}).items():
        table.add_section()
        table.add_row(Text(title, style="bold"))
        for measure in measures:
            table.add_row(_text(measure.label), *map(_text, measure.cells))
    return table


def _text(value: Any) -> Text:
    return Text(one_line(value, _CELL_CHARACTERS))


# --- charts -----------------------------------------------------------------------------------------------------------


def _charts(runs: Sequence[Run]) -> Iterator[tuple[Chart, list[StepValues]]]:
    full: list[list[StepValues]] = []
    rolled: list[list[StepValues]] = []
    for run in runs:
        rows = catalog.evaluation_rows(run.record.evaluations, quantized=run.quantized)
        full.append([(step, values) for step, values in rows if "eval/accuracy" in values])
        if not run.quantized:  # all evaluations are of the policy as rolled out
            rows = [
                (step, {key.replace("eval/", "eval_rollout/"): value for key, value in v.items()}) for step, v in rows
            ]
        rolled.append([(step, values) for step, values in rows if "eval_rollout/accuracy" in values])
    for chart in (catalog.REWARD, catalog.SOLVED) if any(run.record.graded for run in runs) else (catalog.SOLVED,):
        panel = replace(chart.panels[0], sparse=True)
        for series, of_runs in zip(panel.series, (full, rolled), strict=True):
            yield _overlay(
                replace(chart, title=f"{chart.title}, {series.label}", panels=(panel,)), series, runs, of_runs
            )
    steps = [run.record.rows for run in runs]
    for key in _OVERLAID:
        in_report = ((c, p, s) for c in catalog.charts() for p in c.panels for s in p.series if s.key == key)
        chart, panel, series = next(in_report)
        yield _overlay(replace(chart, panels=(panel,)), series, runs, steps)
    shares = [[(step, {"clipped": clipped(values)}) for step, values in of_run] for of_run in steps]
    yield _overlay(_CLIPPED, Series("", "clipped"), runs, shares)
    yield _overlay(_SECONDS, Series("", "time/step"), runs, steps)


def _overlay(
    chart: Chart, series: Series, runs: Sequence[Run], rows: Sequence[Sequence[StepValues]]
) -> tuple[Chart, list[StepValues]]:
    """Return the chart's first panel with one line per run, and the merged rows of all runs with distinct keys."""
    keys = [key for key in (series.key, series.low, series.high) if key]
    merged: dict[int, dict[str, float | None]] = {}
    for i, of_run in enumerate(rows):
        for step, values in of_run:
            merged.setdefault(step, {}).update({f"{i} {key}": values.get(key) for key in keys})
    lines = tuple(
        Series(
            run.name,
            f"{i} {series.key}",
            _color(i),
            series.low and f"{i} {series.low}",
            series.high and f"{i} {series.high}",
            dashed=_dashed(i),
        )
        for i, run in enumerate(runs)
    )
    return replace(chart, panels=(replace(chart.panels[0], series=lines),)), sorted(merged.items())


def _color(i: int) -> int:
    return i % _COLORS + 1


def _dashed(i: int) -> bool:
    return i >= _COLORS
