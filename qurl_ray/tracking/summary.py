"""Summary at the end of a run: results, speed, and the locations of its files."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from qurl_ray.report.text import MISSING, duration, one_line
from qurl_ray.runs.values import number


@dataclass(frozen=True, slots=True)
class SummaryLine:
    """One line of the summary; omitted if the run has no such value."""

    label: str
    key: str
    show: Callable[[Any], str]


def _as(spec: str, unit: str = "") -> Callable[[Any], str]:
    """Return a function that formats numbers by `spec`, and leaves other values unchanged."""

    def show(value: Any) -> str:
        return one_line(value) if number(value) is None else format(value, spec) + unit

    return show


def _seconds(value: Any) -> str:
    seconds = number(value)
    return one_line(value) if seconds is None else duration(seconds)


def _phases(value: Any) -> str:
    """Format the seconds of each phase: rollout 12.0 s (40%) · update 18.0 s (60%)"""
    if not isinstance(value, Mapping):
        return one_line(value)
    seconds = {one_line(name): s for name, item in value.items() if (s := number(item)) is not None}
    total = sum(seconds.values())
    return " · ".join(f"{name} {s:.1f} s" + (f" ({s / total:.0%})" if total > 0 else "") for name, s in seconds.items())


def _sets(value: Any) -> str:
    """Format the solved share of each set of held-out problems, a line each: aime24 12.0% → 31.0%"""
    if not isinstance(value, Mapping):
        return one_line(value)
    lines = []
    for name, accuracies in value.items():
        shares = [number(accuracies.get(f"accuracy_{when}")) for when in ("before", "after")]
        lines.append(f"{one_line(name)} " + " → ".join(MISSING if s is None else f"{s:.1%}" for s in shares))
    return "\n".join(lines)


_WHEN = ("before", "after", "after_quantized")
ROWS = (
    SummaryLine("held-out reward before", "reward_before", _as(".3f")),
    SummaryLine("held-out reward after", "reward_after", _as(".3f")),
    SummaryLine("held-out reward after, quantized", "reward_after_quantized", _as(".3f")),
    SummaryLine("paired test of the reward, p", "reward_p_value", _as(".2g")),
    SummaryLine("solved (reward > 0.5) before", "accuracy_before", _as(".1%")),
    SummaryLine("solved after", "accuracy_after", _as(".1%")),
    SummaryLine("solved after, quantized", "accuracy_after_quantized", _as(".1%")),
    SummaryLine("paired test of solved, p", "accuracy_p_value", _as(".2g")),
    SummaryLine("held-out problems", "eval_problems", _as(",")),
    SummaryLine("solved of each set", "eval_sets", _sets),
    SummaryLine("steps", "steps", _as(",")),
    SummaryLine("target reached at step", "target_reached_at_step", _as(",")),
    SummaryLine("training time", "train_seconds", _seconds),
    SummaryLine("samples per second", "samples_per_second", _as(",.1f")),
    SummaryLine("rollout tokens per second", "rollout_tokens_per_second", _as(",.0f")),
    SummaryLine("rollout speed-up over full precision", "rollout_speedup", _as(".2f", "×")),
    SummaryLine("time by phase", "phase_seconds", _phases),
    SummaryLine("precision flow", "precision_flow", one_line),
    SummaryLine("adapter", "adapter", one_line),
    SummaryLine("rollout quantization", "quantization", one_line),
    SummaryLine("correction", "correction", one_line),
    SummaryLine("its effect", "correction_effect", one_line),
    SummaryLine("UAQ scale", "uaq_scale", _as("g")),
    SummaryLine("run folder", "run_dir", one_line),
    SummaryLine("policy", "policy", one_line),
    SummaryLine("checkpoint", "checkpoint", one_line),
    SummaryLine("report", "report", one_line),
    SummaryLine("MLflow run", "mlflow_run_id", one_line),
)


def commands(values: Mapping[str, Any]) -> list[str]:
    """Return a line for each command that may come next: to resume, to look, to compare."""
    lines = []
    if values.get("interrupted"):
        lines.append("the run has not made all its steps: the same command resumes it")
    if (uri := values.get("mlflow_uri")) and not uri.startswith("http"):
        lines.append(f"mlflow ui --backend-store-uri {shlex.quote(one_line(uri))}")
    if page := values.get("mlflow_page"):
        lines.append(one_line(page))
    if (run_dir := values.get("run_dir")) and values.get("policy"):
        lines.append(f"qurl evaluate {shlex.quote(one_line(run_dir))} --samples 8")
    return lines


def summary_panel(values: Mapping[str, Any], title: str) -> Panel:
    """Return a table of the known values in `values`, in the order of ROWS. If every reward is 0 or 1, the mean reward
    equals the solved share and is omitted."""
    graded = any(values.get(f"reward_{when}") != values.get(f"accuracy_{when}") for when in _WHEN)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in ROWS:
        if values.get(row.key) is not None and (graded or not row.key.startswith("reward_")):
            # Text, not markup: a path or name may hold square brackets.
            table.add_row(row.label, Text(row.show(values[row.key])))
    return Panel(table, title=Text(title), title_align="left", expand=False)
