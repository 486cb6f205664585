import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.report.axes import linear_axis, log_axis, short
from qurl_ray.report.charts import Chart, Panel, Series, draw, thin

rows = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=60).map(
    lambda values: [(n, {"a": value}) for n, value in enumerate(values, start=3)]
)


@settings(max_examples=150, deadline=None)
@given(rows, st.integers(1, 20))
def test_thinning_keeps_extremes_means_and_every_step(rows, limit):
    columns = thin(rows, [Series("a", "a")], limit)
    assert len(columns) <= limit
    assert [n for column in columns for n in range(column.first, column.last + 1)] == [n for n, _ in rows]
    for column in columns:
        inside = [v["a"] for n, v in rows if column.first <= n <= column.last and v["a"] is not None]
        cell = column.cells.get("a")
        assert (cell is None) == (not inside)
        if cell:
            assert (cell.low, cell.high) == (min(inside), max(inside))
            assert cell.mean == pytest.approx(sum(inside) / len(inside), abs=1e-3)


def drawn(values, **panel) -> str:
    chart = Chart("t", "", (Panel((Series("a", "a"),), "u", **panel),))
    return str(draw(chart, [(n, {"a": value}) for n, value in enumerate(values, start=1)]))


def ticks(svg: str) -> list[tuple[float, float]]:
    """(height in the drawing, number on it)"""
    found = re.findall(r'class="tick end" x="[^"]*" y="([^"]*)">([^<]*)<', svg)
    return [(float(y) - 3.5, float(label.replace(",", "").replace("−", "-"))) for y, label in found if label != "step"]


@pytest.mark.parametrize(
    ("values", "panel"),
    [([0.2, 0.7, 0.4], {}), ([-3.0, 12.0, 4.0], {"zero": True}), ([1.0, 900.0, 30.0], {"log": True})],
)
def test_points_stand_where_the_ticks_say(values, panel):
    svg = drawn(values, **panel)
    scale = math.log10 if "log scale" in svg else float
    assert ("log scale" in svg) == ("log" in panel)
    (y0, low), *_, (y1, high) = ticks(svg)
    assert (y1, low) < (y0, high)  # upwards is more
    (line,) = re.findall(r'class="line c1" d="M([^"]*)"', svg)
    heights = [float(point.split()[1]) for point in line.split("L")]
    for height, value in zip(heights, values, strict=True):
        expected = y0 + (y1 - y0) * (scale(value) - scale(low)) / (scale(high) - scale(low))
        assert height == pytest.approx(expected, abs=0.2)


def test_a_missing_value_is_a_gap_and_a_lone_point_a_dot():
    svg = drawn([1.0, 2.0, None, 3.0, None, 4.0, 5.0])
    (line,) = re.findall(r'class="line c1" d="([^"]*)"', svg)
    assert [part.count("L") for part in line.split("M")[1:]] == [1, 0, 1]
    (dots,) = re.findall(r'</text><path class="line[^>]*><path class="dot c1" d="([^"]*)"', svg)
    assert dots.count("h0") == 5
    assert drawn([None, 3.0]).count('class="hit"') == 1


def test_values_that_do_not_span_decades_and_zeros_keep_a_usable_axis():
    assert "log scale" not in drawn([1.0, 20.0], log=True)
    assert "log scale" not in drawn([0.0, 0.0], log=True)
    assert "nan" not in drawn([0.0, 1e-6, 1e3], log=True)  # 0 is at the lower edge


@settings(max_examples=300, deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), st.booleans())
def test_ticks_are_round_few_and_enclose_the_values(a, b, zero):
    low, high = min(a, b), max(a, b)
    axis = linear_axis(low, high, zero=zero)
    slack = 1e-5 * (axis.high - axis.low)
    assert axis.low <= low + slack
    assert axis.high >= high - slack
    assert 2 <= len(axis.ticks) <= 7
    assert axis.low < axis.high
    for value, label in axis.ticks:
        shown = float(label.replace(",", "").replace("−", "-")) * 10.0**axis.exponent
        assert shown == pytest.approx(value, abs=1e-9 * max(abs(axis.low), abs(axis.high)))
    assert axis.share(axis.low) == 0.0
    assert axis.share(axis.high) == 1.0


@pytest.mark.parametrize(("low", "high"), [(1e-9, 1e9), (0.02, 3.0), (10.0, 1000.0)])
def test_a_log_axis_has_few_decades_as_ticks_around_the_values(low, high):
    axis = log_axis(low, high)
    assert 10**axis.low <= low * (1 + 1e-9)
    assert high <= 10**axis.high * (1 + 1e-9)
    assert 2 <= len(axis.ticks) <= 6
    assert axis.share(0.0) == 0.0


def test_numbers_are_short_but_not_wrong():
    assert [short(v) for v in (0, 0.26899, -12.34, 12386.4, 4.07e-5, 3.2e7)] == [
        *("0", "0.269", "−12.3", "12,386"),
        *("4.07·10⁻⁵", "3.20·10⁷"),
    ]
    axis = linear_axis(0.9997, 0.9997)
    assert axis.text(0.9997) == "0.9997"  # not 1.00
    assert linear_axis(0, 4).text(-0.0001) == "−0.0001"
