"""Running sums of digits: problems whose answers are as long as their prompts, and every token of them counts."""

import random
from collections.abc import Iterator
from itertools import accumulate

from qurl_ray.types import Problem


def running_sums(digits: int = 8, count: int = 8000, seed: int = 0) -> Iterator[Problem]:
    """Yield `count` different problems such as 35623012= with the answer 38469902, the sum of all digits up to each
    place, modulo 10.

    Raises:
        ValueError: there are fewer problems of so many digits.
    """
    for number in random.Random(seed).sample(range(10**digits), count):
        given = f"{number:0{digits}d}"
        sums = accumulate(map(int, given), lambda before, digit: (before + digit) % 10)
        yield Problem(uid=f"running-sums-{given}", prompt=f"{given}=", answer="".join(map(str, sums)))
