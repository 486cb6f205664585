"""What the person at the terminal sees: a live table with a progress bar, or one plain line a step."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from qurl_ray.tracking.sink import Outcome, Sink
from qurl_ray.tracking.summary import summary_panel
from qurl_ray.tracking.text import MISSING, duration, one_line, pairs
from qurl_ray.tracking.values import number
from qurl_ray.types import Event

Mode = Literal["auto", "table", "plain", "none"]
_ROWS_SHOWN = 8
_SAMPLE_WIDTH = 100
_LOG_WIDTH = 160
# The table is drawn by the driver, which shares the cores with the training it reports.
_REFRESH_PER_S = 2


@dataclass(frozen=True, slots=True)
class Column:
    """A number of the step. Its value is the sum of those of `keys` that the step has."""

    title: str
    keys: tuple[str, ...]
    form: str
    optional: bool = False
    """Left out, rather than shown as missing, where no step has it."""

    def value(self, values: Mapping[str, Any]) -> float | None:
        found = [value for key in self.keys if (value := number(values.get(key))) is not None]
        return sum(found) if found else None

    def show(self, values: Mapping[str, Any]) -> str:
        value = self.value(values)
        return MISSING if value is None else format(value, self.form)


COLUMNS = (
    Column("reward", ("reward/mean",), ".3f"),
    Column("held-out reward", ("eval/reward",), ".3f", optional=True),
    Column("solved", ("eval/accuracy",), ".1%", optional=True),
    Column("KL(b‖p)", ("mismatch/kl",), ".2e"),
    Column("clipped", ("clip/upper", "clip/lower"), ".2%"),
    Column("ESS", ("mismatch/ess",), ".3f"),
    Column("tokens/s", ("rollout/tokens_per_second",), ",.0f"),
    Column("s/step", ("time/step",), ".2f"),
)


class Pace:
    """Seconds per step over the last steps, by the clock: evaluation and checkpoints between steps count too.

    Args:
        at_most: the run may end before its last step.
    """

    def __init__(self, steps: int, *, at_most: bool = False) -> None:
        self._steps, self._at_most = steps, at_most
        self._seen: deque[tuple[int, float]] = deque(maxlen=_ROWS_SHOWN + 1)
        self._fallback_s: float | None = None

    def saw(self, event: Event, at: float) -> None:
        """Step `event.step` (from 1) was complete at unix time `at`, in seconds."""
        self._seen.append((event.step, at))
        self._fallback_s = number(event.values.get("time/step"))

    def left_s(self) -> float | None:
        """Seconds until the last step ends; None before anything is known."""
        if not self._seen:
            return None
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        per_step_s = (ended - began) / (last - first) if last > first else self._fallback_s
        return None if per_step_s is None else per_step_s * max(0, self._steps - last)

    def left(self) -> str:
        seconds = self.left_s()
        return MISSING if seconds is None else f"{'≤ ' if self._at_most else ''}{duration(seconds)}"


class _Screen(Console):
    """A console whose closed pipe (`job | head`) is an error like others; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("standard output was closed")


class _View(Protocol):
    """How steps are drawn; everything else is printed alike."""

    def step(self, event: Event, at: float) -> None: ...
    def samples(self, event: Event) -> None: ...
    def evaluation(self, event: Event) -> None: ...
    def stop(self) -> None: ...


class ConsoleSink:
    """Prints messages, evaluations and the summary; leaves steps and samples to its view."""

    name = "console"

    def __init__(self, console: Console, view: _View, *, title: str) -> None:
        self._console = console
        self._view = view
        self._title = title

    def handle(self, event: Event, at: float) -> None:
        if event.kind == "prompts":
            return
        if event.kind == "step":
            self._view.step(event, at)
        elif event.kind == "samples":
            self._view.samples(event)
        elif event.kind == "evaluation":
            event = _told_once(event)
            self._view.evaluation(event)
            _print(self._console, *message_line(event))
        elif event.kind == "summary":
            self._view.stop()
            self._console.print(summary_panel(event.values, self._title))
        else:
            _print(self._console, *message_line(event))

    def notices(self) -> list[str]:
        return []

    def close(self, outcome: Outcome) -> None:
        self._view.stop()
        if outcome != "finished":
            _print(self._console, f"run {self._title} {outcome}", "bold red")


class PlainView:
    """One line a step, for logs and pipes."""

    def __init__(self, console: Console, pace: Pace, *, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._pace = pace

    def step(self, event: Event, at: float) -> None:
        self._pace.saw(event, at)
        shown = (column for column in COLUMNS if not column.optional or column.value(event.values) is not None)
        numbers = "  ".join(f"{column.title} {column.show(event.values)}" for column in shown)
        _print(self._console, f"step {event.step}/{self._steps}  {numbers}  left {self._pace.left()}")

    def samples(self, event: Event) -> None:
        """Samples are in samples.jsonl; a log holds one line a step."""

    def evaluation(self, event: Event) -> None:
        """It has a line of its own."""

    def stop(self) -> None:
        """Nothing is open."""


class TableView:
    """Progress bar, the last steps, and the last sampled rollouts, redrawn in place."""

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
        self._task = self._progress.add_task(title, total=steps, left=MISSING)
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=_REFRESH_PER_S)
        self._live.start()

    def step(self, event: Event, at: float) -> None:
        self._pace.saw(event, at)
        self._rows.append(event)
        self._progress.update(self._task, completed=event.step, left=self._pace.left())

    def samples(self, event: Event) -> None:
        self._samples = [sample_line(sample) for sample in event.values.get("samples", [])]

    def evaluation(self, event: Event) -> None:
        self._evaluations[event.step] = event.values
        if event.values.get("target_reached"):  # the bar is full
            self._progress.update(self._task, total=event.step, left=duration(0))

    def stop(self) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        rows = [(row.step, {**row.values, **self._evaluations.get(row.step, {})}) for row in list(self._rows)]
        return Group(self._progress, *([step_table(rows)] if rows else []), *self._samples)


def open_console(
    mode: Mode, *, steps: int, title: str, may_end_early: bool = False, console: Console | None = None
) -> Sink | None:
    """The sink for `mode`; None if nothing is to be shown. `auto` is a table on a terminal, else plain lines."""
    if mode == "none":
        return None
    console, title = console or _standard_output(), one_line(title)
    table = mode == "table" or (mode == "auto" and console.is_terminal)
    pace = Pace(steps, at_most=may_end_early)
    view = TableView(console, pace, steps=steps, title=title) if table else PlainView(console, pace, steps=steps)
    return ConsoleSink(console, view, title=title)


def _standard_output() -> Console:
    """A log has no width of its own, and the 80 columns that rich assumes would break paths that one wants to copy."""
    screen = _Screen(highlight=False)
    return screen if screen.is_terminal else _Screen(highlight=False, width=_LOG_WIDTH)


def step_table(rows: list[tuple[int, dict[str, Any]]]) -> Table:
    """One row per (step, its values)."""
    columns = [c for c in COLUMNS if not c.optional or any(c.value(values) is not None for _, values in rows)]
    table = Table()
    for title in ("step", *(column.title for column in columns)):
        table.add_column(title, justify="right", no_wrap=True)
    for step, values in rows:
        table.add_row(str(step), *(column.show(values) for column in columns))
    return table


def sample_line(sample: Mapping[str, Any]) -> Text:
    """`12+34= → 46  reward 1`; as Text, because a policy may well write `[/bold]`."""
    prompt, answer = (one_line(sample.get(key, MISSING), _SAMPLE_WIDTH) for key in ("prompt", "answer"))
    reward = number(sample.get("reward"))
    line = f"{prompt} → {answer}  reward {MISSING if reward is None else format(reward, '.3g')}"
    return Text(line, style="dim", no_wrap=True, overflow="ellipsis")


def _told_once(event: Event) -> Event:
    """An evaluation without its mean reward where that is the share solved, since every reward is 0 or 1."""
    if event.values.get("eval/reward") != event.values.get("eval/accuracy"):
        return event
    return replace(event, values={key: v for key, v in event.values.items() if not key.startswith("eval/reward")})


def message_line(event: Event) -> tuple[str, str]:
    """(text, style) of a warning, a message or an evaluation."""
    numbers = pairs({"eval/solved" if key == "eval/accuracy" else key: v for key, v in event.values.items()}, "eval/")
    if event.kind == "evaluation":
        return f"evaluation at step {event.step}  {one_line(event.message)}  {numbers}".replace("    ", "  "), "cyan"
    if event.kind == "warning":
        return f"warning (step {event.step}): {one_line(event.message)}", "yellow"
    return one_line(event.message) or numbers, ""


def _print(console: Console, line: str, style: str = "") -> None:
    """A line of foreign text: no markup, no highlighting, and no wrapping where it is logged to a file."""
    console.print(Text(line, style=style), soft_wrap=not console.is_terminal, highlight=False)
