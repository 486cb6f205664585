"""Functions as a user would write them, for the tests of tools."""

from dataclasses import dataclass
from datetime import date
from typing import Literal


def weather(city: str, unit: Literal["C", "F"] = "C", days: list[int] | None = None) -> dict:
    """Return the weather
    of a city.

    It is not real.

    Args:
        city: Name of the city,
            without its country.
        unit (str): C or F.
    """
    return {"city": city, "unit": unit, "days": days}


async def later(day: date, share: float = 0.5) -> str:
    return f"{day:%d.%m.%Y} {share}"


def odd_names(json: str, copy: int, self_: bool, model_config: str) -> str:
    return f"{json} {copy} {self_} {model_config}"


def raises(text: str) -> str:
    raise KeyError(text)


def returns_an_object() -> object:
    return object()


def without_hints(text):
    return text


def with_anything(*texts: str) -> str:
    return "".join(texts)


@dataclass
class Counter:
    """Counts from `start`."""

    start: int = 0

    def __call__(self, step: int) -> int:
        """Count further.

        Args:
            step: How far.
        """
        self.start += step
        return self.start


class Solution:
    """A tool that knows the problem."""

    def reset(self, problem) -> None:
        self.answer = problem.answer

    def __call__(self) -> str:
        """Tell the solution."""
        return self.answer


class Silent:
    """A class that is no tool."""

    def run(self, city: str) -> str:
        return city


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b
