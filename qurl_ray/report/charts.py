"""Charts as inline SVG, drawn by pure functions. They contain no script; a style sheet defines the colours by class.

A chart is a stack of panels over one axis of steps. A long run is divided into at most `COLUMNS` columns with equally
many steps. The line is the mean of a column; the band behind it extends from the smallest to the largest value, so no
extreme is lost. The column under the pointer shows its steps and values; without a pointer, the last column does.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from markupsafe import Markup, escape

from qurl_ray.report.axes import Axis, linear_axis, log_axis, power_of_ten, round_step
from qurl_ray.runs.values import StepValues

COLUMNS = 250
_FEW = 40
"""Largest number of columns for which points are drawn as dots and intervals as whiskers."""
_FEW_SERIES = 3
"""Largest number of series in a panel for which the line above the drawing shows intervals beside the values."""
_LOG_FROM = 30.0
"""Smallest ratio of largest to smallest positive value for which a panel with `log` is logarithmic."""

# In units of the drawing, about one pixel each if three cards are beside each other.
_WIDTH, _HEIGHT = 400, 236
_READOUT, _HEADER, _STEPS = 18, 24, 20
_CHARACTER = 6.1


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel.

    Example:
        Series("mean reward", "reward/mean")
    """

    label: str
    key: str
    color: int = 1
    """Number of the colour class in the style sheet: 1 for c1, …"""
    low: str = ""
    high: str = ""
    """Keys of the ends of the interval around the value, or "" if it has none."""
    dashed: bool = False
    """True for a dashed line, used if it may overlap another line."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Series on one vertical axis."""

    series: tuple[Series, ...]
    unit: str
    """Label of the axis: `s`, `nats per token`, …"""
    percent: bool = False
    """True if values are shares, which are shown in per cent."""
    zero: bool = False
    """True if the axis includes 0."""
    log: bool = False
    """True if the axis is logarithmic when the values span decades."""
    stacked: bool = False
    sparse: bool = False
    """True if each series has values only at some steps: its line then connects all of them, without gaps."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Content of one card: a title, a note for the reader, and panels."""

    title: str
    reading: str
    """Sentence that tells the reader what to look for."""
    panels: tuple[Panel, ...]
    absent: str = "This run has not recorded it."
    """Text shown instead of the drawing if no panel has a value; the card is left out if there is none."""
    calm: bool = False
    """True if nobody needs to see it as long as all of its values are 0."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Values of one series in one column."""

    low: float
    mean: float
    high: float


@dataclass(frozen=True, slots=True)
class Column:
    """Steps `first` to `last`, both included, with cells by key of the series."""

    first: int
    last: int
    cells: Mapping[str, Cell]


def draw(chart: Chart, rows: Sequence[StepValues]) -> Markup | None:
    """Draw the chart as an <svg> element. Return None if no row has any of its values."""
    panels = present(chart, rows)
    if not panels:
        return None
    columns = thin(rows, [series for panel in panels for series in panel.series])
    plots = _plots(panels, columns)
    last = max(i for i, column in enumerate(columns) if column.cells)
    values = ", ".join(f"{series.label} {text}" for series, text in _values(plots, columns[last]))
    label = escape(f"{chart.title}: {_steps(columns[last])}, {values}")
    left = max(4, *(len(text) for plot in plots for _, text in plot.axis.ticks)) * _CHARACTER + 8
    across = _Across(columns, left)
    shapes = [shape for plot in plots for shape in (*_frame(plot, across), *_data(plot, across))]
    top, bottom = plots[0].top, plots[-1].bottom
    hits = [_hit(plots, across, i, top, bottom) for i, column in enumerate(columns) if column.cells]
    readout = f'<text class="last" y="11">{_readout(plots, columns[last])}</text>'
    content = "".join([*shapes, *_step_axis(across, bottom), readout, *hits])
    return Markup(f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{content}</svg>')


def present(chart: Chart, rows: Sequence[StepValues]) -> list[Panel]:
    """Return the chart's panels with only those series that have at least one value, without empty panels."""
    seen = {key for _, values in rows for key, value in values.items() if value is not None}
    panels = (replace(panel, series=tuple(s for s in panel.series if s.key in seen)) for panel in chart.panels)
    return [panel for panel in panels if panel.series]


def is_calm(chart: Chart, rows: Sequence[StepValues]) -> bool:
    """Return True if the chart may be folded: it is of those that are calm at 0, and it has only that value."""
    keys = {series.key for panel in present(chart, rows) for series in panel.series}
    return chart.calm and bool(keys) and not any(values.get(key) for _, values in rows for key in keys)


def thin(rows: Sequence[StepValues], series: Iterable[Series], limit: int = COLUMNS) -> list[Column]:
    """Combine rows into at most `limit` columns. Each keeps the smallest, mean and largest value of every series."""
    wanted, size = list(series), math.ceil(len(rows) / limit)
    columns = []
    for start in range(0, len(rows), size or 1):
        part = rows[start : start + size]
        cells = {}
        for line in wanted:
            numbers = [value for _, values in part if (value := values.get(line.key)) is not None]
            if numbers:
                ends = [v for _, values in part for key in (line.low, line.high) if (v := values.get(key)) is not None]
                low, high = min(numbers + ends), max(numbers + ends)
                mean = min(max(math.fsum(numbers) / len(numbers), low), high)  # rounding must not push it outside
                cells[line.key] = Cell(low, mean, high)
        columns.append(Column(part[0][0], part[-1][0], cells))
    return columns


# --- drawing ----------------------------------------------------------------------------------------------------------


def _axis(panel: Panel, columns: Sequence[Column], intervals: int) -> Axis:
    cells = [[column.cells[s.key] for s in panel.series if s.key in column.cells] for column in columns]
    if panel.stacked:
        return linear_axis(0.0, max(sum(cell.mean for cell in stack) for stack in cells), zero=True)
    ends = [end for row in cells for cell in row for end in (cell.low, cell.high)]
    positive = [end for end in ends if end > 0]
    if panel.log and positive and max(positive) >= _LOG_FROM * min(positive):
        return log_axis(min(positive), max(positive), intervals=intervals)
    factor, suffix = (100, " %") if panel.percent else (1, "")
    return linear_axis(factor * min(ends), factor * max(ends), zero=panel.zero, suffix=suffix, intervals=intervals)


@dataclass(frozen=True, slots=True)
class _Plot:
    """Panel with its position in the drawing; y grows downwards."""

    panel: Panel
    axis: Axis
    top: float
    bottom: float

    def y(self, value: float) -> float:
        return self.bottom - self.axis.share(value * self.factor) * (self.bottom - self.top)

    @property
    def factor(self) -> int:
        return 100 if self.panel.percent else 1

    def dodge(self, i: int) -> float:
        """Horizontal shift of series `i`, so that intervals at one step are drawn beside each other."""
        series = self.panel.series
        apart = min(6.0, 24.0 / len(series))
        return apart * (i - (len(series) - 1) / 2) if any(s.low for s in series) else 0.0


class _Across:
    """Horizontal positions of the columns."""

    def __init__(self, columns: Sequence[Column], left: float) -> None:
        self.columns, self.left, self.right = columns, left, _WIDTH - 8.0
        self.first, self.last = columns[0].first, columns[-1].last
        centers = [(column.first + column.last) / 2 for column in columns]
        between = [(a.last + b.first) / 2 for a, b in pairwise(columns)]
        self.centers = [self.x(step) for step in centers]
        self.edges = [self.x(step) for step in (self.first - 0.5, *between, self.last + 0.5)]

    def x(self, step: float) -> float:
        """Position of `step`, with a margin of half a step on both sides, so that a single step has a width."""
        share = (step - self.first + 0.5) / (self.last - self.first + 1)
        return self.left + share * (self.right - self.left)


def _plots(panels: Sequence[Panel], columns: Sequence[Column]) -> list[_Plot]:
    height = (_HEIGHT - _READOUT - _STEPS) / len(panels)
    intervals = 4 if len(panels) == 1 else 2
    tops = [_READOUT + i * height + _HEADER for i in range(len(panels))]
    return [
        _Plot(panel, _axis(panel, columns, intervals), top, top + height - _HEADER)
        for panel, top in zip(panels, tops, strict=True)
    ]


def _frame(plot: _Plot, across: _Across) -> Iterable[str]:
    """Yield the unit, the ticks and their lines."""
    note = " · log scale" if plot.axis.log else f" · ×{power_of_ten(plot.axis.exponent)}" if plot.axis.exponent else ""
    yield f'<text class="unit" x="{_n(across.left)}" y="{_n(plot.top - 7)}">{escape(plot.panel.unit + note)}</text>'
    for tick, label in plot.axis.ticks:
        y = plot.y(tick / plot.factor)
        yield f'<path class="grid" d="M{_n(across.left)} {_n(y)}H{_n(across.right)}"/>'
        yield f'<text class="tick end" x="{_n(across.left - 6)}" y="{_n(y + 3.5)}">{label}</text>'


def _step_axis(across: _Across, bottom: float) -> Iterable[str]:
    yield f'<text class="tick end" x="{_n(across.left - 6)}" y="{_n(bottom + 14)}">step</text>'
    every = int(max(1, round_step(max(1, across.last - across.first) / 5)))
    ticks = range(math.ceil(across.first / every) * every, across.last + 1, every)
    for step in ticks if len(ticks) > 1 else (across.first,):
        yield f'<text class="tick mid" x="{_n(across.x(step))}" y="{_n(bottom + 14)}">{step:,}</text>'


def _data(plot: _Plot, across: _Across) -> Iterable[str]:
    if plot.panel.stacked:
        yield from _stack(plot, across)
        return
    few = len(across.columns) <= _FEW
    for i, series in enumerate(plot.panel.series):
        cells = {j: cell for j, column in enumerate(across.columns) if (cell := column.cells.get(series.key))}
        xs = [x + plot.dodge(i) for x in across.centers]
        runs = [list(cells)] if plot.panel.sparse and cells else _unbroken(cells)
        if few and series.low:
            yield _path("whisker", series, (_whisker(plot, xs[j], cells[j]) for run in runs for j in run))
        else:
            yield _path("band", series, (_band(plot, xs, cells, run) for run in runs))
        kind = "line dashed" if series.dashed else "line"
        yield _path(kind, series, (_polyline((xs[j], plot.y(cells[j].mean)) for j in run) for run in runs))
        dots = (j for run in runs for j in run if few or len(run) == 1)
        yield _path("dot", series, (_dot(xs[j], plot.y(cells[j].mean)) for j in dots))


def _stack(plot: _Plot, across: _Across) -> Iterable[str]:
    """Yield bars without gaps, stacked in the order of the series."""
    base = [0.0] * len(across.columns)
    for series in plot.panel.series:
        bars = []
        for j, column in enumerate(across.columns):
            if cell := column.cells.get(series.key):
                low, high = plot.y(base[j]), plot.y(base[j] + cell.mean)
                base[j] += cell.mean
                bars.append(f"M{_n(across.edges[j])} {_n(low)}V{_n(high)}H{_n(across.edges[j + 1])}V{_n(low)}z")
        yield _path("bar", series, bars)


def _hit(plots: Sequence[_Plot], across: _Across, i: int, top: float, bottom: float) -> str:
    """Elements shown while the pointer is over column `i`: a line, a dot for each series, and the values."""
    column, x = across.columns[i], across.centers[i]
    left, width = across.edges[i], across.edges[i + 1] - across.edges[i]
    dots = "".join(
        f'<path class="dot c{series.color}" d="{_dot(x + plot.dodge(k), plot.y(cell.mean))}"/>'
        for plot in plots
        if not plot.panel.stacked
        for k, series in enumerate(plot.panel.series)
        if (cell := column.cells.get(series.key))
    )
    area = f'<rect x="{_n(left)}" y="{_n(top)}" width="{_n(width)}" height="{_n(bottom - top)}"/>'
    line = f'<path class="here" d="M{_n(x)} {_n(top)}V{_n(bottom)}"/>'
    return f'<g class="hit">{area}{line}{dots}<text y="11">{_readout(plots, column)}</text></g>'


def _readout(plots: Sequence[_Plot], column: Column) -> str:
    values = (f' <tspan class="c{s.color}">●</tspan> {text}' for s, text in _values(plots, column))
    return f"<tspan>{_steps(column)}</tspan> " + "".join(values)


def _steps(column: Column) -> str:
    return f"step {column.first:,}" if column.first == column.last else f"steps {column.first:,}–{column.last:,}"


def _values(plots: Sequence[_Plot], column: Column) -> Iterable[tuple[Series, str]]:
    """Yield each series with the text of its values in the column: value and interval, if it has one; else the range
    over the steps; in a stack, the mean."""
    for plot in plots:
        for series in plot.panel.series:
            if cell := column.cells.get(series.key):
                low, mean, high = (plot.axis.text(v * plot.factor) for v in (cell.low, cell.mean, cell.high))
                if series.low:
                    interval = f" ({low}–{high})" if len(plot.panel.series) <= _FEW_SERIES else ""
                    mean = f"{mean}{plot.axis.suffix}{interval}"
                elif low != high and not plot.panel.stacked:
                    mean = f"{low}–{high}"
                yield series, mean + ("" if series.low else plot.axis.suffix)


def _unbroken(indices: Iterable[int]) -> list[list[int]]:
    """Group rising indices into runs of consecutive ones."""
    groups = groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0])
    return [[j for _, j in run] for _, run in groups]


def _band(plot: _Plot, xs: Sequence[float], cells: Mapping[int, Cell], run: Sequence[int]) -> str:
    if all(cells[j].low == cells[j].high for j in run):
        return ""
    upper = [(xs[j], plot.y(cells[j].high)) for j in run]
    lower = [(xs[j], plot.y(cells[j].low)) for j in reversed(run)]
    return _polyline(upper + lower) + "z"


def _whisker(plot: _Plot, x: float, cell: Cell) -> str:
    low, high = plot.y(cell.low), plot.y(cell.high)
    return f"M{_n(x - 3)} {_n(high)}h6M{_n(x)} {_n(high)}V{_n(low)}M{_n(x - 3)} {_n(low)}h6"


def _polyline(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _dot(x: float, y: float) -> str:
    """Path of a line with length 0: its round ends form a dot."""
    return f"M{_n(x)} {_n(y)}h0"


def _path(kind: str, series: Series, parts: Iterable[str]) -> str:
    data = "".join(parts)
    return f'<path class="{kind} c{series.color}" d="{data}"/>' if data else ""


def _n(value: float) -> str:
    """Format a coordinate, to one decimal."""
    return f"{value:.1f}".removesuffix(".0")
