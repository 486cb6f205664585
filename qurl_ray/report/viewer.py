"""rollouts/: all recorded rollouts of a run, with one page per step and a table of the steps.

A page holds its samples as data and draws only the visible ones, so that it opens at once with hundreds of long
answers. Its script creates only text nodes from the text of a policy, so that it is never interpreted as markup.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl_ray.files import write_whole
from qurl_ray.report.page import TEXT_LIMIT, render_page, script_data
from qurl_ray.report.text import one_line
from qurl_ray.report.tokens import GAP_BOUNDS, PROBABILITY_BOUNDS, gap_class, mismatch
from qurl_ray.runs.files import run_name, sample_places, samples_at

FOLDER = "rollouts"
_FOLDED_LIMIT = 20_000  # characters of meta, or of the state of an environment
_STYLES = ("page.css.j2", "viewer.css.j2")
_LINKS = {"timeline": "timeline.html", "report": "report.html"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Row of the table of steps; None for values that were not recorded."""

    step: int
    samples: int
    solved: int
    failed: int
    truncated: int
    reward: float | None
    """Mean reward over the samples that have one."""
    gap: float | None
    """Gap with the largest absolute value, engine's log-prob minus the learner's, in nats."""
    color: str
    """Style class of that gap."""
    max_rho: float | None
    ess: float | None
    """Smallest effective sample size of a sample."""


def write_rollouts(run_dir: Path, *, limit_bytes: float = math.inf) -> Path | None:
    """Write `run_dir`/rollouts/ from samples.jsonl: index.html and step-<n>.html. Return the path of the index, or None
    if no rollout was recorded. May be called during the run; pages of steps that are no longer recorded are deleted.

    Args:
        limit_bytes: size limit of samples.jsonl. If the file is larger, nothing is written, and None is returned.

    Raises:
        OSError: the folder is missing or not writable.
    """
    recorded = run_dir / "samples.jsonl"
    places = sample_places(run_dir) if recorded.is_file() and recorded.stat().st_size <= limit_bytes else {}
    if not places:
        return None
    folder, name = run_dir / FOLDER, run_name(run_dir)
    folder.mkdir(exist_ok=True)
    wanted = {page_name(step) for step in places}
    for old in folder.glob("step-*.html"):
        if old.name not in wanted:
            old.unlink()
    links = {label: f"../{file}" for label, file in _LINKS.items()}
    steps, rows = list(places), []
    for i, step in enumerate(steps):
        samples = [card(sample) for sample in samples_at(run_dir, places[step])]
        around = {"before": steps[i - 1] if i else None, "after": steps[i + 1] if i + 1 < len(steps) else None}
        write_whole(folder / page_name(step), step_page(name, step, samples, links, **around))
        rows.append(step_row(step, samples))
    page = render_page("viewer_index.html.j2", styles=_STYLES, name=name, rows=rows, links=links, page_name=page_name)
    write_whole(folder / "index.html", page)
    return folder / "index.html"


def page_name(step: int) -> str:
    return f"step-{step}.html"


def step_page(
    name: str,
    step: int,
    samples: list[dict[str, Any]],
    links: dict[str, str],
    *,
    before: int | None = None,
    after: int | None = None,
) -> str:
    """Return the text of a step's page.

    Args:
        samples: samples as returned by `card`.
        before, after: previous and next recorded step.
    """
    data = {"samples": samples, "gap_bounds": GAP_BOUNDS, "probability_bounds": PROBABILITY_BOUNDS}
    return render_page(
        "viewer.html.j2",
        styles=_STYLES,
        script="viewer.js.j2",
        name=name,
        step=step,
        before=page_name(before) if before is not None else None,
        after=page_name(after) if after is not None else None,
        links=links,
        gap_bounds=[f"{bound:g}" for bound in GAP_BOUNDS],
        probability_bounds=[f"{bound:g}" for bound in PROBABILITY_BOUNDS],
        recorded=len(samples),
        said=any(sample["turns"] for sample in samples),
        data=script_data(data),
    )


def card(sample: dict[str, Any]) -> dict[str, Any]:
    """Convert a line of samples.jsonl for the page's script."""
    tokens = sample.get("tokens")
    engine, learner = sample.get("logprobs") or [], sample.get("proximal_logprobs") or []
    comparison, replies = mismatch(engine, learner), sample.get("said") or []
    return {
        "uid": one_line(sample.get("uid", ""), TEXT_LIMIT),
        "prompt": str(sample.get("rendered") or sample.get("prompt", "")),
        "answer": None if tokens else str(sample.get("answer", "")),
        "expected": None if sample.get("expected") is None else str(sample["expected"]),
        "reward": sample.get("reward"),
        "status": one_line(sample.get("status", "ok"), TEXT_LIMIT),
        "finish": one_line(sample["finish"], TEXT_LIMIT) if sample.get("finish") else None,
        "limit": one_line(sample.get("limit", ""), TEXT_LIMIT),
        "detail": one_line(sample.get("detail", ""), TEXT_LIMIT),
        "meta": _folded(sample.get("meta")),
        "states": [_folded(reply.get("state")) for reply in replies],
        "advantage": sample.get("advantage"),
        "gap": comparison and _short(comparison.gap),
        "max_rho": comparison and _short(comparison.max_rho),
        "ess": comparison and _short(comparison.ess),
        "tokens": tokens,
        "engine": engine,
        "learner": learner,
        "versions": sample.get("versions") or [],
        "rows": sample.get("rows") or [],
        "turns": len(sample.get("turns") or []),
        "calls": sum(reply.get("calls") or 0 for reply in replies),
        "credit": sample.get("credit") or [],
    }


def step_row(step: int, samples: list[dict[str, Any]]) -> StepRow:
    """Summarise a step's samples, which are as returned by `card`."""
    rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
    seen = [sample for sample in samples if sample["gap"] is not None]
    gap = max((sample["gap"] for sample in seen), key=abs, default=None)
    return StepRow(
        step=step,
        samples=len(samples),
        solved=sum(reward > 0.5 for reward in rewards),
        failed=sum(sample["status"] != "ok" for sample in samples),
        truncated=sum(sample["finish"] == "length" for sample in samples),
        reward=sum(rewards) / len(rewards) if rewards else None,
        gap=gap,
        color=gap_class(gap) if gap is not None else "",
        max_rho=max((sample["max_rho"] for sample in seen), default=None),
        ess=min((sample["ess"] for sample in seen), default=None),
    )


def _folded(value: Any) -> str:
    """Return a mapping as JSON to read; "" if there is nothing in it."""
    return json.dumps(value, indent=1, ensure_ascii=False)[:_FOLDED_LIMIT] if value else ""


def _short(value: float) -> float:
    return float(f"{value:.6g}")
