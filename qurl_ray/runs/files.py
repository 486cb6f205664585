"""Reader of a run's folder. It is lenient: the run may not have ended, or may have been killed while writing a line."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qurl_ray.config.shown import shown
from qurl_ray.config.yaml_text import read_yaml_file
from qurl_ray.errors import ConfigError
from qurl_ray.runs.values import StepValues, number

_MAX_STEP = 10**12
_NO_MEASUREMENT = 1e100
"""Limit of size for a measurement. Beyond it, a difference of two values may overflow; no real value is near it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Mean reward and share of solved problems on the held-out problems, each with the ends of its interval.

    None stands for values that the event lacked, or that were not finite. Earlier versions recorded no rewards.
    """

    step: int
    label: str
    """Kind of evaluation: `before`, `during`, `after` or `after, quantized`."""
    accuracy: float
    """Share of solved problems: those with a reward above 0.5."""
    low: float | None
    high: float | None
    problems: float | None
    outcomes: str = ""
    """One character per problem, "1" if it was solved and "0" if not; "" if that was not recorded."""
    reward: float | None = None
    reward_low: float | None = None
    reward_high: float | None = None
    rewards: tuple[float, ...] = ()
    """Reward of each problem; empty if they were not recorded."""
    sets: dict[str, tuple[float, float | None, float | None]] = field(default_factory=dict)
    """Share of solved problems with the ends of its interval, by the names of sets, if there are several."""

    @property
    def graded(self) -> bool:
        """True if some rewards are neither 0 nor 1, so that the mean reward differs from the solved share."""
        return self.reward is not None and self.reward != self.accuracy


@dataclass(slots=True)
class RunRecord:
    """Content of the files of a run."""

    config: dict[str, Any]
    summary: dict[str, Any] | None
    """Content of summary.json; None until the run has ended by itself or by Ctrl-C."""
    rows: list[StepValues] = field(default_factory=list)
    """Finite numbers of every step; if a step was recorded twice, the later values."""
    evaluations: list[Evaluation] = field(default_factory=list)
    warnings: dict[str, list[int]] = field(default_factory=dict)
    """Steps of each warning by message, in the order of their first appearance."""
    began: float | None = None
    ended: float | None = None
    """Unix times of the first event (`began`) and the last one (`ended`), in seconds."""
    unreadable: int = 0
    """Number of lines of metrics.jsonl that are not a JSON object with a step."""

    @property
    def graded(self) -> bool:
        """True if the mean reward of evaluations is to be shown beside the solved share."""
        return any(evaluation.graded for evaluation in self.evaluations)

    @property
    def planned(self) -> int | None:
        """Number of steps that the settings ask for."""
        steps = finite(self.config.get("steps"))
        return int(steps) if steps else None

    @property
    def done(self) -> int:
        """Number of steps done: the summary's, else that of the recorded ones."""
        steps: Any = (self.summary or {}).get("steps")
        return steps if is_step(steps) else len(self.rows)

    @property
    def state(self) -> Literal["finished", "interrupted", "unfinished"]:
        """State of the run, as summary.json has it. "unfinished" means that it has not ended, or that it ended without
        a summary that says how."""
        summary = self.summary or {}
        if has_finished(summary):
            return "finished"
        return "interrupted" if summary.get("interrupted") is True else "unfinished"


def read_run(run_dir: Path) -> RunRecord:
    """Read config.yaml, metrics.jsonl and summary.json. Missing or incomplete files count as empty."""
    record = RunRecord(config=read_config(run_dir), summary=read_summary(run_dir))
    steps: dict[int, StepValues] = {}
    for _, event in lines(run_dir / "metrics.jsonl"):
        if event is None:
            record.unreadable += 1
            continue
        step, values = event["step"], event.get("values")
        values = values if isinstance(values, dict) else {}
        if (at := finite(event.get("time"))) is not None:
            record.began = at if record.began is None else record.began
            record.ended = at
        if event.get("kind") == "step":
            steps[step] = (step, {key: finite(value) for key, value in values.items()})
        elif event.get("kind") == "warning":
            record.warnings.setdefault(str(event.get("message") or ""), []).append(step)
        elif event.get("kind") == "evaluation" and (evaluation := _evaluation(step, event.get("message"), values)):
            record.evaluations.append(evaluation)
    record.rows = [steps[step] for step in sorted(steps)]
    return record


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Read summary.json; None if it is absent, or is no JSON object."""
    try:
        return json_object((run_dir / "summary.json").read_bytes())
    except FileNotFoundError:
        return None


def has_finished(summary: dict[str, Any]) -> bool:
    """True if a summary says that its run ended by itself, after a number of steps. A summary without these keys counts
    as unfinished."""
    return is_step(summary.get("steps")) and summary.get("interrupted") is False


def run_name(run_dir: Path) -> str:
    """Return the run's name from config.yaml, else that of the folder."""
    return str(read_config(run_dir).get("name") or run_dir.resolve().name)


def sample_places(run_dir: Path) -> dict[int, list[int]]:
    """Return the offsets of each step's samples in samples.jsonl, in bytes; in the order of the steps."""
    places: dict[int, list[int]] = {}
    for place, sample in lines(run_dir / "samples.jsonl"):
        if sample is not None:
            places.setdefault(sample["step"], []).append(place)
    return dict(sorted(places.items()))


def samples_at(run_dir: Path, places: Iterable[int]) -> list[dict[str, Any]]:
    """Read the samples at offsets from `sample_places`."""
    with (run_dir / "samples.jsonl").open("rb") as file:
        samples = [json_object(file.readline()) for place in places if file.seek(place) == place]
    return [sample for sample in samples if sample is not None]


def read_spans(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid spans of timeline.jsonl: lines with lane, name, start and seconds."""
    for _, span in lines(run_dir / "timeline.jsonl"):
        if span and isinstance(span.get("lane"), str) and isinstance(span.get("name"), str):
            start, seconds = finite(span.get("start")), finite(span.get("seconds"))
            if start is not None and seconds is not None and seconds >= 0:
                yield span


def finite(value: Any) -> float | None:
    """Return `value` as a float if it is a finite number within the limit of size, else None."""
    try:
        measured = number(value)
    except OverflowError:  # an integer too large for a float
        return None
    if measured is None or not math.isfinite(measured) or abs(measured) >= _NO_MEASUREMENT:
        return None
    return measured


def _evaluation(step: int, label: Any, values: dict[str, Any]) -> Evaluation | None:
    accuracy, low, high, problems = (finite(values.get(f"eval/{k}")) for k in ("accuracy", "low", "high", "problems"))
    if accuracy is None:
        return None
    outcomes = values.get("outcomes")
    outcomes = outcomes if isinstance(outcomes, str) else ""
    reward, reward_low, reward_high = (finite(values.get(f"eval/{k}")) for k in ("reward", "reward_low", "reward_high"))
    sets = {}
    for key in values:
        name = key.removeprefix("eval/").removesuffix("/accuracy")
        if key == f"eval/{name}/accuracy" and (share := finite(values[key])) is not None:
            sets[name] = (share, finite(values.get(f"eval/{name}/low")), finite(values.get(f"eval/{name}/high")))
    return Evaluation(
        step=step,
        label=str(label),
        accuracy=accuracy,
        low=low,
        high=high,
        problems=problems,
        outcomes=outcomes,
        reward=reward,
        reward_low=reward_low,
        reward_high=reward_high,
        rewards=() if reward is None else _rewards(values.get("rewards"), outcomes),
        sets=sets,
    )


def _rewards(recorded: Any, outcomes: str) -> tuple[float, ...]:
    """Return the reward of each problem. If all are 0 or 1, they equal the outcomes and are not recorded separately."""
    if not isinstance(recorded, list):
        return tuple(float(outcome == "1") for outcome in outcomes)
    rewards = [finite(reward) for reward in recorded]
    return tuple(reward for reward in rewards if reward is not None) if None not in rewards else ()


def lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (offset in bytes, object) per line, with None for a line that is not an object with a step."""
    if not path.is_file():
        return
    place = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                record = json_object(line)
                yield place, record if record is not None and is_step(record.get("step")) else None
            place += len(line)


def is_step(value: Any) -> bool:
    """True for the number of a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_STEP


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the object that a line or file holds; None if it holds none."""
    try:
        value = json.loads(line.decode("utf-8", errors="replace").removeprefix("\ufeff"))
    except (ValueError, RecursionError):  # incomplete, or written by another program
        return None
    return value if isinstance(value, dict) else None


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the run's settings without their secrets; empty if config.yaml is missing or damaged."""
    try:
        settings = shown(read_yaml_file(run_dir / "config.yaml"))
    except (FileNotFoundError, ConfigError):
        return {}
    return settings if isinstance(settings, dict) else {}
