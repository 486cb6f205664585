"""Console output of a run: a live table with a progress bar, or one plain line per step."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from qurl_ray.report.text import MISSING, duration, one_line, pairs
from qurl_ray.runs.values import number
from qurl_ray.tracking.sink import Sink
from qurl_ray.tracking.summary import commands, summary_panel
from qurl_ray.types import Event, Outcome

Mode = Literal["auto", "table", "plain", "none"]
_ROWS_SHOWN = 8
_SAMPLE_WIDTH = 100
_LOG_WIDTH = 160
# The driver draws the table, and shares the cores with the training.
_REFRESH_PER_S = 2


@dataclass(frozen=True, slots=True)
class MetricColumn:
    """Number shown for each step: the sum of those values of `keys` that the step has."""

    title: str
    keys: tuple[str, ...]
    form: str
    optional: bool = False
    """True to omit the column, rather than show it as missing, if no step has the value."""

    def value(self, values: Mapping[str, Any]) -> float | None:
        numbers = [value for key in self.keys if (value := number(values.get(key))) is not None]
        return sum(numbers) if numbers else None

    def show(self, values: Mapping[str, Any]) -> str:
        value = self.value(values)
        return MISSING if value is None else format(value, self.form)


COLUMNS = (
    MetricColumn("reward", ("reward/mean",), ".3f"),
    MetricColumn("held-out reward", ("eval/reward",), ".3f", optional=True),
    MetricColumn("solved", ("eval/accuracy",), ".1%", optional=True),
    MetricColumn("KL(b‖p)", ("mismatch/kl",), ".2e"),
    MetricColumn("clipped", ("clip/upper", "clip/lower"), ".2%"),
    MetricColumn("ESS", ("mismatch/ess",), ".3f"),
    MetricColumn("tokens/s", ("rollout/tokens_per_second",), ",.0f"),
    MetricColumn("s/step", ("time/step",), ".2f"),
)


class Pace:
    """Estimate of the remaining time, from the wall time of the last steps, including evaluations and checkpoints.

    Args:
        at_most: True if the run may end before its last step, so that the estimate is an upper limit.
    """

    def __init__(self, steps: int, *, at_most: bool = False) -> None:
        self._steps, self._at_most = steps, at_most
        self._seen: deque[tuple[int, float]] = deque(maxlen=_ROWS_SHOWN + 1)
        self._fallback_s: float | None = None

    def saw(self, event: Event, at: float) -> None:
        """Record that step `event.step` (from 1) was complete at unix time `at`, in seconds."""
        self._seen.append((event.step, at))
        self._fallback_s = number(event.values.get("time/step"))

    def left_s(self) -> float | None:
        """Seconds until the end of the last step; None before the first step."""
        if not self._seen:
            return None
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        per_step_s = (ended - began) / (last - first) if last > first else self._fallback_s
        return None if per_step_s is None else per_step_s * max(0, self._steps - last)

    def left(self) -> str:
        seconds = self.left_s()
        return MISSING if seconds is None else f"{'≤ ' if self._at_most else ''}{duration(seconds)}"


class _Screen(Console):
    """Console that raises an ordinary error if its pipe is closed (`job | head`); rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("standard output was closed")


class _View(Protocol):
    """Display of steps, samples and evaluations. All other events are printed in the same way for every view."""

    def step(self, event: Event, at: float) -> None: ...
    def stage(self, line: str, step: int) -> None: ...
    def samples(self, event: Event) -> None: ...
    def evaluation(self, event: Event) -> None: ...
    def stop(self) -> None: ...


class ConsoleSink(Sink):
    """Sink that prints messages, evaluations and the summary; its view shows steps and samples."""

    name = "console"

    def __init__(self, console: Console, view: _View, *, title: str) -> None:
        self._console = console
        self._view = view
        self._title = title

    def handle(self, event: Event, at: float) -> None:
        if event.kind in ("prompts", "checkpoint", "phase"):
            return
        if event.kind == "step":
            self._view.step(event, at)
        elif event.kind == "samples":
            self._view.samples(event)
        elif event.kind == "evaluation":
            values = event.values
            if values.get("eval/reward") == values.get("eval/accuracy"):  # as every reward is 0 or 1
                values = {key: value for key, value in values.items() if not key.startswith("eval/reward")}
                event = replace(event, values=values)
            self._view.evaluation(event)
            _print(self._console, *message_line(event))
        elif event.kind == "summary":
            self._view.stop()
            self._console.print(summary_panel(event.values, self._title))
            for line in commands(event.values):  # below the box, where a terminal copies them whole
                _print(self._console, line)
        else:
            _print(self._console, *message_line(event))

    def stage(self, line: str, step: int) -> None:
        """Show a line on the stage that the run is in (tracking.stages), after `step` steps."""
        self._view.stage(one_line(line), step)

    def close(self, outcome: Outcome) -> None:
        self._view.stop()
        if outcome != "finished":
            _print(self._console, f"run {self._title} {outcome}", "bold red")


class PlainView:
    """View with one line per step, for logs and pipes."""

    def __init__(self, console: Console, pace: Pace, *, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._pace = pace

    def step(self, event: Event, at: float) -> None:
        self._pace.saw(event, at)
        shown = (column for column in COLUMNS if not column.optional or column.value(event.values) is not None)
        numbers = "  ".join(f"{column.title} {column.show(event.values)}" for column in shown)
        _print(self._console, f"step {event.step}/{self._steps}  {numbers}  left {self._pace.left()}")

    def stage(self, line: str, step: int) -> None:
        _print(self._console, line)

    def samples(self, event: Event) -> None:
        """Do nothing: samples are in samples.jsonl, and a log has one line per step."""

    def evaluation(self, event: Event) -> None:
        """Do nothing: the sink prints a line for each evaluation."""

    def stop(self) -> None:
        """Do nothing: nothing is open."""


class TableView:
    """View with a progress bar, the last steps and the last sampled rollouts, redrawn in place."""

    def __init__(self, console: Console, pace: Pace, *, steps: int, title: str) -> None:
        self._pace = pace
        self._rows: deque[Event] = deque(maxlen=_ROWS_SHOWN)
        self._samples: list[Text] = []
        self._evaluations: dict[int, Mapping[str, Any]] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            console=console,
        )
        self._title = title
        self._task = self._progress.add_task(title, total=steps, left=MISSING)
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=_REFRESH_PER_S)
        self._live.start()

    def step(self, event: Event, at: float) -> None:
        self._pace.saw(event, at)
        self._rows.append(event)
        self._progress.update(self._task, completed=event.step, left=self._pace.left(), description=self._title)

    def stage(self, line: str, step: int) -> None:
        """Show it beside the title, and the steps that were made before."""
        self._progress.update(self._task, completed=step, description=f"{self._title}: {line}")

    def samples(self, event: Event) -> None:
        self._samples = [sample_line(sample) for sample in event.values.get("samples", [])]

    def evaluation(self, event: Event) -> None:
        if event.message != "after, quantized":  # `after` is of the same step
            self._evaluations[event.step] = event.values
        self._progress.update(self._task, description=self._title)
        if event.values.get("target_reached"):  # so the progress bar is full
            self._progress.update(self._task, total=event.step, left=duration(0))

    def stop(self) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        rows = [(row.step, {**row.values, **self._evaluations.get(row.step, {})}) for row in list(self._rows)]
        return Group(self._progress, *([step_table(rows)] if rows else []), *self._samples)


def open_console(
    mode: Mode, *, steps: int, title: str, may_end_early: bool = False, console: Console | None = None
) -> ConsoleSink | None:
    """Return the sink for `mode`; None for "none". `auto` is a table on a terminal, else plain lines."""
    if mode == "none":
        return None
    if console is None:
        console = _Screen(highlight=False)
        if not console.is_terminal:  # a log: rich's 80 columns would break long paths
            console = _Screen(highlight=False, width=_LOG_WIDTH)
    title = one_line(title)
    table = mode == "table" or (mode == "auto" and console.is_terminal)
    pace = Pace(steps, at_most=may_end_early)
    view = TableView(console, pace, steps=steps, title=title) if table else PlainView(console, pace, steps=steps)
    return ConsoleSink(console, view, title=title)


def step_table(rows: list[tuple[int, dict[str, Any]]]) -> Table:
    """Return a table with one row per (step, values)."""
    columns = [c for c in COLUMNS if not c.optional or any(c.value(values) is not None for _, values in rows)]
    table = Table()
    for title in ("step", *(column.title for column in columns)):
        table.add_column(title, justify="right", no_wrap=True)
    for step, values in rows:
        table.add_row(str(step), *(column.show(values) for column in columns))
    return table


def sample_line(sample: Mapping[str, Any]) -> Text:
    """Format a sample as `12+34= → 46  reward 1`. It is a Text, because a policy may write markup such as `[/bold]`."""
    prompt, answer = (one_line(sample.get(key, MISSING), _SAMPLE_WIDTH) for key in ("prompt", "answer"))
    reward = number(sample.get("reward"))
    line = f"{prompt} → {answer}  reward {MISSING if reward is None else format(reward, '.3g')}"
    return Text(line, style="dim", no_wrap=True, overflow="ellipsis")


def message_line(event: Event) -> tuple[str, str]:
    """Return (text, style) for a warning, a message or an evaluation."""
    shown = {}
    for key, value in event.values.items():
        if key.count("/") < 2 or key.endswith("/accuracy"):  # of one set of held-out problems, only the share solved
            shown["eval/solved" if key == "eval/accuracy" else key.removesuffix("/accuracy")] = value
    numbers = pairs(shown, "eval/")
    if event.kind == "evaluation":
        return f"evaluation at step {event.step}  {one_line(event.message)}  {numbers}".replace("    ", "  "), "cyan"
    if event.kind == "warning":
        return f"warning (step {event.step}): {one_line(event.message)}", "yellow"
    return one_line(event.message) or numbers, ""


def _print(console: Console, line: str, style: str = "") -> None:
    """Print a line of untrusted text, without markup or highlighting, and without wrapping if it goes to a file."""
    console.print(Text(line, style=style), soft_wrap=not console.is_terminal, highlight=False)
