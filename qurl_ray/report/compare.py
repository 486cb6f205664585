"""Comparison of runs: results, speed, mismatch between rollouts and learner, and differing settings."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qurl_ray.config.paths import expanded
from qurl_ray.errors import ConfigError
from qurl_ray.extensions import did_you_mean
from qurl_ray.report.axes import short, signed
from qurl_ray.report.text import MISSING, duration, format_setting
from qurl_ray.runs.files import Evaluation, RunRecord, finite, read_run
from qurl_ray.runs.values import flatten
from qurl_ray.spans import PHASES

MOST = 16
"""Largest number of runs that one page can distinguish."""
_ASIDE = ("name", "output_dir", "task.reward_timeout_s", "task.verifiers")
"""Settings that are ignored, because their differences do not matter for a comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run with a name that is unique in the comparison."""

    name: str
    record: RunRecord

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by dotted name, in the form of config.yaml."""
        return {key: format_setting(value) for key, value in flatten(self.record.config, ".") if key not in _ASIDE}

    @property
    def task(self) -> dict[str, Any]:
        """Settings that determine which problems are held out."""
        wanted = {key: value for key, value in self.settings.items() if key.startswith("task.")}
        return wanted | {"evaluation.problems": self.settings.get("evaluation.problems")}

    @property
    def quantized(self) -> bool:
        """True if rollouts do not use the full-precision policy."""
        return self.settings.get("rollout.quantization") != "none"

    def values(self, key: str) -> list[float]:
        """Return the recorded values of this metric, in the order of the steps."""
        return [value for _, step in self.record.rows if (value := step.get(key)) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference of two means over the same problems, second minus first, with 95 % interval and p of a paired test."""

    value: float
    low: float
    high: float
    p_value: float


Pairing = Callable[[Sequence[float], Sequence[float]], Difference]
"""Function that compares two policies by one value per problem: the reward, or 1 for solved and 0 for not solved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Line of a table, with one cell for every run."""

    label: str
    cells: list[str]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Content of a comparison, independent of how it is displayed."""

    runs: list[Run]
    tables: dict[str, list[Measure]]
    """Lines by heading, without lines for which no run has a value."""
    settings: list[Measure]
    """Settings that are not the same in all runs."""
    warnings: list[str] = field(default_factory=list)


def compare(runs: Sequence[Run], pairing: Pairing) -> Comparison:
    """Compare runs. Differences of held-out figures are relative to the first run.

    Raises:
        ConfigError: there are fewer than two runs, or more than MOST.
    """
    if not 2 <= len(runs) <= MOST:
        raise ConfigError(f"can compare 2 to {MOST} runs, not {len(runs)}")
    steps = [
        f"{run.record.done:,} of {run.record.planned:,}" if run.record.planned else f"{run.record.done:,}"
        for run in runs
    ]
    tables = {
        "Run": [
            Measure(label="state", cells=[run.record.state for run in runs]),
            Measure(label="steps", cells=steps),
        ],
        "Held-out reward": list(_held_out(runs, _REWARD, pairing)) if any(run.record.graded for run in runs) else [],
        "Held-out problems solved, %": list(_held_out(runs, _SOLVED, pairing)),
        "Speed": list(_speeds(runs)),
        "Mismatch and clipping": list(_mismatches(runs)),
    }
    known = {title: [m for m in measures if set(m.cells) != {MISSING}] for title, measures in tables.items()}
    return Comparison(
        runs=list(runs),
        tables={title: measures for title, measures in known.items() if measures},
        settings=differing(runs),
        warnings=list(_warnings(runs)),
    )


# --- which runs -------------------------------------------------------------------------------------------------------


def read_runs(names: Iterable[str], folder: Path) -> list[Run]:
    """Read the runs with these names in `folder`, or with these paths.

    Raises:
        ConfigError: a run does not exist; the message names the one with the most similar name.
    """
    paths = list(dict.fromkeys(find_run(name, folder).resolve() for name in names))
    return named((path.name, str(path), read_run(path)) for path in paths)


def newest(folder: Path, count: int) -> list[str]:
    """Paths of the latest runs in `folder` that recorded a step, the oldest of them first."""
    paths = sorted(_run_folders(folder), key=lambda path: (path / "metrics.jsonl").stat().st_mtime, reverse=True)
    with_steps = (path for path in paths if b'"kind": "step"' in (path / "metrics.jsonl").read_bytes())
    return [str(path) for path, _ in zip(with_steps, range(count), strict=False)][::-1]


def named(records: Iterable[tuple[str, str, RunRecord]]) -> list[Run]:
    """Create runs from (name, longer name, record). The longer name is used if several runs have the same name."""
    entries = list(records)
    names = [name for name, _, _ in entries]
    return [Run(name=name if names.count(name) == 1 else long, record=record) for name, long, record in entries]


def find_run(name: str, folder: Path) -> Path:
    """Return the folder of the run with this name in `folder`, or with this path.

    Raises:
        ConfigError: it does not exist; the message names the one with the most similar name, or all.
    """
    for path in (expanded(name), folder / name):
        if (path / "metrics.jsonl").is_file():
            return path
    known = [path.name for path in _run_folders(folder)]
    hint = did_you_mean(Path(name).name, known, cutoff=0.5) or f"; there are: {', '.join(sorted(known)) or 'none'}"
    raise ConfigError(f"no run {name!r}: it is neither the folder of a run nor the name of a run in {folder}{hint}")


def _run_folders(folder: Path) -> list[Path]:
    return [path.parent for path in folder.glob("*/metrics.jsonl")]


# --- content of the tables --------------------------------------------------------------------------------------------


def differing(runs: Sequence[Run]) -> list[Measure]:
    """Return the settings that are not the same in all runs, with a dash if a run does not have one."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = (Measure(label=key, cells=[str(run.settings.get(key, MISSING)) for run in runs]) for key in keys)
    return [row for row in rows if len(set(row.cells)) > 1]


def _warnings(runs: Sequence[Run]) -> Iterator[str]:
    tasks = [run.task for run in runs]
    keys = [
        key for key in dict.fromkeys(k for task in tasks for k in task) if len({str(t.get(key)) for t in tasks}) > 1
    ]
    if keys:
        yield (
            f"These runs do not have the same problems ({', '.join(keys)} differ): their held-out figures and rewards "
            "cannot be compared."
        )
    for run in runs:
        if run.record.state == "unfinished":
            yield f"{run.name} is unfinished: it has no summary, and its figures are those of its steps so far."
        elif run.record.state == "interrupted":
            yield f"{run.name} was stopped before its last step."
    for run in runs:
        if run.record.unreadable:
            yield f"{run.record.unreadable} line(s) of {run.name}'s metrics.jsonl could not be read and are left out."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """Definition of an evaluation figure: functions for its value with interval ends and for its values per problem,
    and the format of its numbers."""

    estimate: Callable[[Evaluation], tuple[float | None, float | None, float | None]]
    per_problem: Callable[[Evaluation], Sequence[float]]
    scale: float
    digits: int
    difference: str
    test: str
    """Notes on the difference between two runs (`difference`), and on its test (`test`)."""

    def write(self, value: float, sign: str = "") -> str:
        return signed(format(self.scale * value, f"{sign}.{self.digits}f"))


_REWARD = _Figure(
    estimate=lambda evaluation: (evaluation.reward, evaluation.reward_low, evaluation.reward_high),
    per_problem=lambda evaluation: evaluation.rewards,
    scale=1,
    digits=3,
    difference="paired",
    test="paired permutation test",
)
_SOLVED = _Figure(
    estimate=lambda evaluation: (evaluation.accuracy, evaluation.low, evaluation.high),
    per_problem=lambda evaluation: [float(outcome == "1") for outcome in evaluation.outcomes],
    scale=100,
    digits=1,
    difference="paired, percentage points",
    test="exact McNemar test",
)


def _held_out(runs: Sequence[Run], figure: _Figure, pairing: Pairing) -> Iterator[Measure]:
    latest = [{evaluation.label: evaluation for evaluation in run.record.evaluations} for run in runs]
    before = [_estimate(by_label.get("before"), figure) for by_label in latest]
    yield Measure(label="before", cells=before, note="95 % intervals")
    full = [by_label.get("after") for by_label in latest]
    yield Measure(label="after, full precision", cells=[_estimate(evaluation, figure) for evaluation in full])
    yield from _against_first(runs, full, figure, pairing)
    rolled = [  # the latest evaluation during the run if there is no final one yet
        by_label.get("after, quantized" if run.quantized else "after") or by_label.get("during")
        for run, by_label in zip(runs, latest, strict=True)
    ]
    yield Measure(label="after, as rolled out", cells=[_estimate(evaluation, figure) for evaluation in rolled])
    yield from _against_first(runs, rolled, figure, pairing)


def _estimate(evaluation: Evaluation | None, figure: _Figure) -> str:
    value, low, high = figure.estimate(evaluation) if evaluation else (None, None, None)
    if evaluation is None or value is None:
        return MISSING
    interval = "" if low is None or high is None else f" [{figure.write(low)}, {figure.write(high)}]"
    at = f" at step {evaluation.step:,}" if evaluation.label == "during" else ""
    return f"{figure.write(value)}{interval}{at}"


def _against_first(
    runs: Sequence[Run], evaluations: Sequence[Evaluation | None], figure: _Figure, pairing: Pairing
) -> Iterator[Measure]:
    """Yield paired differences to the first run; a dash if problems differ, or were not recorded individually."""
    values = [figure.per_problem(evaluation) if evaluation else () for evaluation in evaluations]
    differences, tests = [MISSING], [MISSING]
    for run, other in zip(runs[1:], values[1:], strict=True):
        if run.task == runs[0].task and len(values[0]) == len(other) > 0:
            paired = pairing(values[0], other)
            value, low, high = (figure.write(end, "+") for end in (paired.value, paired.low, paired.high))
            differences.append(f"{value} [{low}, {high}]")
            tests.append(f"{paired.p_value:.2g}")
        else:
            differences.append(MISSING)
            tests.append(MISSING)
    yield Measure(label="  difference from the first run", cells=differences, note=figure.difference)
    yield Measure(label="  p-value of the difference", cells=tests, note=figure.test)


def _speeds(runs: Sequence[Run]) -> Iterator[Measure]:
    seconds = [math.fsum(run.values("time/step")) for run in runs]
    yield Measure(
        label="training time", cells=[duration(s) if s else MISSING for s in seconds], note="without evaluations"
    )
    yield _ratio("samples per second", runs, "rollout/samples", "time/step")
    yield _ratio("rollout tokens per second", runs, "rollout/tokens", "time/rollout")
    yield Measure(label="seconds per step", cells=[_mean(run.values("time/step")) for run in runs])
    for phase in PHASES:
        yield Measure(label=f"  {phase}", cells=[_mean(run.values(f"time/{phase}")) for run in runs])


def _mismatches(runs: Sequence[Run]) -> Iterator[Measure]:
    means = {
        "KL(b‖p)": "mismatch/kl",
        "effective sample size": "mismatch/ess",
        "absolute log-prob gap": "mismatch/abs_logprob_gap",
    }
    for label, key in means.items():
        yield Measure(label=label, cells=[_mean(run.values(key)) for run in runs], note="mean of the steps")
    most = [run.values("certificate/cost_most") for run in runs]
    note = "reward, at 95 %, over the certificates, at their weights"
    yield Measure(label="cost of quantization, at most", cells=[_end(lambda v: v[-1], v) for v in most], note=note)
    yield Measure(label="smallest effective sample size", cells=[_end(min, run.values("mismatch/ess")) for run in runs])
    yield Measure(label="largest rho", cells=[_end(max, run.values("mismatch/max_rho")) for run in runs])
    shares = [[clipped(step) for _, step in run.record.rows] for run in runs]
    known = [[share for share in of_run if share is not None] for of_run in shares]
    yield Measure(
        label="clipped tokens", cells=[_mean(of_run, percent=True) for of_run in known], note="mean of the steps"
    )
    truncated = [run.values("mismatch/truncated") for run in runs]
    yield Measure(label="tokens with rho above the cap", cells=[_mean(of_run, percent=True) for of_run in truncated])


def clipped(step: Mapping[str, float | None]) -> float | None:
    """Share of a step's tokens whose gradient is cut off by the clip; None if it was not recorded."""
    shares = [step.get(f"clip/{side}") for side in ("upper", "lower", "dual")]
    return None if shares[0] is None else math.fsum(share or 0.0 for share in shares)


def _ratio(label: str, runs: Sequence[Run], above: str, below: str) -> Measure:
    pairs = [(math.fsum(run.values(above)), math.fsum(run.values(below))) for run in runs]
    return Measure(label=label, cells=[short(a / b) if b else MISSING for a, b in pairs])


def _mean(values: Sequence[float], *, percent: bool = False) -> str:
    if not values:
        return MISSING
    mean = math.fsum(values) / len(values)
    return f"{short(100 * mean)} %" if percent else short(mean)


def _end(pick: Callable[[Sequence[float]], float], values: Sequence[float]) -> str:
    return short(pick(values)) if values and finite(pick(values)) is not None else MISSING
