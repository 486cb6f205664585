"""Chart axes with round ticks, and readable formats for numbers."""

import math
from dataclasses import dataclass

_MORE_DECIMALS = 4
_TINY = 1e-90
"""Values smaller than this are drawn as 0: no measurement is as small, and a fraction of one might round to 0."""
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis that converts values to positions along its length, and to text."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    """Ticks as (value, label), in rising order."""
    log: bool = False
    exponent: int = 0
    """Power of ten by which values are divided for the labels."""
    suffix: str = ""

    def share(self, value: float) -> float:
        """Position of `value` from 0 (lower end) to 1 (upper end), clamped. On a log axis, values <= 0 are at 0."""
        if self.log:
            value = math.log10(value) if value > 0 else -math.inf
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def text(self, value: float) -> str:
        """Format `value` to about a thousandth of the axis, or to three digits on a log axis, without the suffix."""
        if self.log:
            return short(value)
        scaled = value / 10.0**self.exponent
        finest = 2 - math.floor(math.log10((self.high - self.low) / 10.0**self.exponent))
        decimals = 0 if math.isclose(scaled, round(scaled), rel_tol=1e-12) else max(0, finest)
        if decimals:  # 0.9998 is not 1.00
            longer = range(decimals, decimals + _MORE_DECIMALS)
            decimals = next((d for d in longer if not round(scaled, d).is_integer()), decimals)
        power = f"·{power_of_ten(self.exponent)}" if self.exponent and value else ""
        return signed(f"{scaled:,.{decimals}f}") + power


def linear_axis(low: float, high: float, *, zero: bool = False, suffix: str = "", intervals: int = 4) -> Axis:
    """Linear axis that includes both values and ends at round ticks, with about `intervals` intervals."""
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), _TINY):  # only one value
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if abs(high) > _TINY else (0.0, 1.0)
    step = round_step((high - low) / intervals)
    numbers = range(math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6) + 1)
    ticks = [i * step for i in numbers]
    largest = max(abs(ticks[0]), abs(ticks[-1]))
    plain = suffix or 0.01 <= largest < 1e5
    exponent = 0 if plain else math.floor(math.log10(largest) + 1e-9)
    decimals = max(0, -math.floor(math.log10(step) - exponent + 1e-9))
    labels = (signed(f"{tick / 10.0**exponent:,.{decimals}f}") + suffix for tick in ticks)
    return Axis(ticks[0], ticks[-1], tuple(zip(ticks, labels, strict=True)), exponent=exponent, suffix=suffix)


def log_axis(low: float, high: float, *, intervals: int = 4) -> Axis:
    """Log axis of whole decades around two positive values. `low` and `high` of the result are exponents of ten."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / intervals))
    exponents = range(first, last + 1, every)
    labels = (f"{10.0**e:,g}" if -2 <= e <= 4 else power_of_ten(e) for e in exponents)
    return Axis(first, last, tuple((10.0**e, label) for e, label in zip(exponents, labels, strict=True)), log=True)


def round_step(least: float) -> float:
    """Smallest number of the form 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def signed(text: str) -> str:
    """Replace hyphens by a true minus sign, and remove the sign of a zero."""
    return text.lstrip("-") if not text.strip("-0.,") else text.replace("-", "−")


def power_of_ten(exponent: int) -> str:
    return "10" + str(exponent).translate(_SUPERSCRIPT)


def short(value: float) -> str:
    """Format `value` to three digits: 0.269, 12,386, 4.07·10⁻⁵."""
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        return signed(f"{value:.3g}")
    if 1e3 <= abs(value) < 1e6:
        return signed(f"{value:,.0f}")
    mantissa, exponent = f"{value:.2e}".split("e")
    return signed(mantissa) + "·" + power_of_ten(int(exponent))
