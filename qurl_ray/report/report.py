"""report.html: report of a run on one page, which needs no network, no script and no server."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from qurl_ray.config.shown import redacted
from qurl_ray.files import write_whole
from qurl_ray.report import catalog
from qurl_ray.report.axes import short, signed
from qurl_ray.report.charts import Series, draw, is_calm, present
from qurl_ray.report.page import render_page
from qurl_ray.report.text import MISSING, duration, format_setting, listed
from qurl_ray.runs.files import Evaluation, RunRecord, finite, read_run
from qurl_ray.runs.values import flatten
from qurl_ray.types import Outcome

NAME = "report.html"
ROLLOUTS, TIMELINE = "rollouts/index.html", "timeline.html"
"""Other pages, which the report links to if they exist: see report.viewer and report.timeline."""
_WARNINGS = 20
_STATES = {
    "finished": "It made all its steps, or reached its target.",
    "interrupted": "It was asked to stop before its last step; it evaluated, and saved what it had learned.",
    "unfinished": "No summary.json says how it ended: the run is still going on, or something ended it.",
    "failed": "An error ended it; what follows is what it had recorded until then.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """Tile with a held-out figure at one point of the run."""

    label: str
    value: str
    unit: str
    interval: str
    drawing: Markup
    solved: str = ""
    """Text on the share of solved problems, if the figure is the mean reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """Card with a chart, its title, note and legend."""

    title: str
    reading: str
    legend: list[Series]
    drawing: Markup | None
    absent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Cards under a heading. `zeros` are those of charts that are folded, as all of their values are 0."""

    title: str
    anchor: str
    cards: list[_Card]
    zeros: list[_Card]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Location of a file or folder of the run; `href` is relative to the report."""

    label: str
    text: str
    href: str = ""


def write_report(run_dir: Path, *, outcome: Outcome | None = None) -> Path:
    """Write `run_dir`/report.html from the files in the folder, and return its path.

    May be called during the run: missing and incomplete files are shown as such, and a reader sees the old page or the
    new one, never a partial one.

    Args:
        outcome: how the run ended, if known; else it is derived from summary.json, which a failed run lacks.

    Raises:
        OSError: the folder is missing or not writable.
    """
    path = run_dir / NAME
    write_whole(path, render_report(run_dir, outcome=outcome))
    return path


def render_report(run_dir: Path, *, outcome: Outcome | None = None) -> str:
    """Return the page's text; see `write_report`."""
    record = read_run(run_dir)
    settings = {key: listed(value) for key, value in flatten(record.config, ".")}
    state = outcome or record.state
    shown_warnings = list(record.warnings.items())[:_WARNINGS]
    return render_page(
        "report.html.j2",
        styles=("page.css.j2", "report.css.j2"),
        name=settings.get("name") or run_dir.resolve().name,
        state=state,
        state_sentence=_STATES[state],
        done=record.done,
        planned=record.planned,
        began=_utc(record.began),
        ended=_utc(record.ended),
        facts=list(_facts(settings, record.summary or {})),
        tiles=list(_tiles(record)),
        figures=list(_figures(record)),
        warnings=[(redacted(text), steps[0], len(steps)) for text, steps in shown_warnings],
        more_warnings=max(0, len(record.warnings) - _WARNINGS),
        unreadable=record.unreadable,
        groups=[_group(group) for group in catalog.groups(record, settings)],
        rollouts=ROLLOUTS if (run_dir / ROLLOUTS).exists() else None,
        timeline=TIMELINE if (run_dir / TIMELINE).exists() else None,
        settings=list(_settings(record.config)),
        places=list(_places(run_dir, settings)),
    )


# --- head of the page -------------------------------------------------------------------------------------------------


def _facts(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of the most important settings; those that config.yaml lacks are omitted. The summary also
    knows the adapters' share of the parameters."""

    def joined(*keys: str) -> str:
        return " ".join(str(settings[key]) for key in keys if settings.get(key) is not None)

    layers, width = settings.get("model.layers"), settings.get("model.hidden_size")
    shape = f", {layers} layers of {width}" if layers and width else ""
    uaq = finite(settings.get("quantization.uaq_scale"))
    rank = settings.get("learner.lora.rank")
    facts = {
        "model": joined("model.path") or joined("model.type") + shape,
        "task": joined("task.type", "task.dataset", "task.path", "task.operators"),
        "algorithm": joined("algorithm.type"),
        "flow": joined("precision_flow").replace("_", " "),
        "adapter": str(summary.get("adapter") or (f"LoRA of rank {rank}" if rank else "")),
        "rollouts": {"none": "full precision"}.get(joined("rollout.quantization"), joined("rollout.quantization")),
        "correction": joined("algorithm.correction.type"),
        "UAQ s": "" if uaq is None else "1 (off)" if uaq == 1 else f"{uaq:g}",
        "updates per rollout": joined("algorithm.updates_per_rollout"),
        "seed": joined("seed"),
    }
    yield from ((name, value) for name, value in facts.items() if value)


def _tiles(record: RunRecord) -> Iterator[_Tile]:
    """Yield the tiles: before, after (or the latest so far), and after with the weights of the rollouts."""
    latest = {evaluation.label: evaluation for evaluation in record.evaluations}
    during = None if "after" in latest else latest.get("during")
    wanted = {
        "before": latest.get("before"),
        f"at step {during.step:,}" if during else "after": during or latest.get("after"),
        "after, quantized": latest.get("after, quantized"),
    }
    for label, result in wanted.items():
        if not result:
            continue
        solved, drawing = _per_cent(result.accuracy), _interval_drawing(result)
        if record.graded and result.reward is not None:
            yield _Tile(
                label=f"held-out reward {label}",
                value=_three_digits(result.reward),
                unit="",
                interval=_interval(result.reward_low, result.reward_high, result.problems, _three_digits),
                drawing=drawing,
                solved=f"solved (reward > 0.5): {solved} %",
            )
        else:
            yield _Tile(
                label=f"solved {label}",
                value=solved,
                unit="%",
                interval=_interval(result.low, result.high, result.problems, _per_cent, " %"),
                drawing=drawing,
            )


def _interval(
    low: float | None, high: float | None, problems: float | None, write: Callable[[float], str], unit: str = ""
) -> str:
    """Format an interval as `95 %: 40.5 – 46.7 % · 1,000 problems`, without the parts that are unknown."""
    ends = [] if low is None or high is None else [f"95 %: {write(low)} – {write(high)}{unit}"]
    return " · ".join(ends + ([] if problems is None else [f"{problems:,.0f} problems"]))


def _three_digits(value: float) -> str:
    return signed(f"{value:.3f}")


def _per_cent(share: float) -> str:
    return f"{100 * share:.1f}"


def _interval_drawing(evaluation: Evaluation) -> Markup:
    """Draw the solved share and its interval on a line from 0 to 100 %."""
    at, low, high = (
        200 * min(1.0, max(0.0, evaluation.accuracy if end is None else end))
        for end in (evaluation.accuracy, evaluation.low, evaluation.high)
    )
    paths = f'<path class="track" d="M0 5H200"/><path class="range" d="M{low:.1f} 5H{high:.1f}"/>'
    return Markup(
        f'<svg viewBox="-4 0 208 10" class="interval" aria-hidden="true">{paths}'
        f'<path class="dot c1" d="M{at:.1f} 5h0"/></svg>'
    )


def _figures(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yield (label, value, unit) of figures over all recorded steps."""
    seconds, rollout = _total(record, "time/step"), _total(record, "time/rollout")
    if seconds:
        yield "training time", duration(seconds), "start and evaluations left out"
        yield "samples per second", short(_total(record, "rollout/samples") / seconds), "all phases"
    if rollout:
        yield "rollout speed", f"{_total(record, 'rollout/tokens') / rollout:,.0f}", "tokens/s"
        if per_pass := [n for _, values in record.rows if (n := values.get("rollout/tokens_per_pass")) is not None]:
            yield "tokens per pass", short(math.fsum(per_pass) / len(per_pass)), "of a row, right drafts included"
        yield "rollouts' share", f"{100 * rollout / seconds:.0f} %" if seconds else MISSING, "of the training time"
    if rhos := [rho for _, values in record.rows if (rho := values.get("mismatch/max_rho")) is not None]:
        yield "largest rho", short(max(rhos)), "of all tokens"
    if (speedup := finite((record.summary or {}).get("rollout_speedup"))) is not None:
        yield "rollout speed-up", f"{speedup:.2f}×", "over full precision"


def _total(record: RunRecord, key: str) -> float:
    return math.fsum(values.get(key) or 0.0 for _, values in record.rows)


# --- body and foot ----------------------------------------------------------------------------------------------------


def _group(group: catalog.Group) -> _Group:
    cards: dict[bool, list[_Card]] = {False: [], True: []}
    for chart, rows in group.charts:
        drawing = draw(chart, rows)
        if not (drawing or chart.absent):
            continue
        legend = [series for panel in present(chart, rows) for series in panel.series]
        card = _Card(
            title=chart.title,
            reading=chart.reading,
            legend=legend if len(legend) > 1 else [],
            drawing=drawing,
            absent=chart.absent,
        )
        cards[is_calm(chart, rows)].append(card)
    anchor = group.title.split()[0].lower().rstrip(",")
    return _Group(title=group.title, anchor=anchor, cards=cards[False], zeros=cards[True])


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield (section, its settings by dotted name); settings without a section come first."""
    yield "run", [(str(key), format_setting(value)) for key, value in config.items() if not isinstance(value, Mapping)]
    for section, values in config.items():
        if isinstance(values, Mapping):
            yield str(section), [(key, format_setting(value)) for key, value in flatten(values, ".")]


def _places(run_dir: Path, settings: Mapping[str, Any]) -> Iterator[_Place]:
    yield _Place(label="run folder", text=str(run_dir.resolve()))
    names = {
        "policy": "policy/",
        "checkpoints": "checkpoints/",
        "numbers of every step": "metrics.jsonl",
        "sampled rollouts": "samples.jsonl",
        "a page per step of them": ROLLOUTS,
        "timeline": TIMELINE,
        "timeline for Perfetto": "timeline.json",
        "settings": "config.yaml",
        "summary": "summary.json",
    }
    for label, name in names.items():
        if (run_dir / name).exists():
            yield _Place(label=label, text=name, href=name)
    if settings.get("tracking.mlflow") is True:
        uri = settings.get("tracking.mlflow_uri") or f"sqlite:///{run_dir.resolve().parent / 'mlflow.db'}"
        yield _Place(label="MLflow", text=f"mlflow ui --backend-store-uri {shlex.quote(str(uri))}")


def _utc(at: float | None) -> str:
    """Format unix seconds as 2026-11-21 04:43 UTC; "" if the time is unknown or not a date."""
    try:
        return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return ""
