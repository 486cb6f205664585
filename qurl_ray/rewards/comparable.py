r"""Texts that math-verify can compare: numbers in a form that it reads as numbers, and quickly compared expressions.

math-verify reads the number 1e3 as the product 1·e·3. Its time grows exponentially with the depth of nested
parentheses, and its time-outs cannot interrupt the computation of one large integer. So texts are checked before.
"""

import math
import re
from decimal import Decimal, InvalidOperation
from itertools import accumulate

LONGEST = 500
"""Largest number of characters that math-verify gets."""
_DEEPEST = 6  # nested brackets
_LARGEST = 9999  # exponents, and numbers beside factorials, binomials, sums and products
_LARGEST_OF_GROUP = 50  # exponents of groups that have letters or powers in them
_MOST_DIGITS = 300  # of a number that is written out

_GROUPED = re.compile(r"[+-]?\d{1,3}(?:(?: |\\,|\\ |\u00a0|\u202f)\d{3})+(?:\.\d+)?")  # 1 000 000.5
_MIXED = re.compile(r"([+-]?\d+) +(\d+)/(\d+)")
_NUMBER_LIKE = re.compile(r"[+-]?(?:0[xXbBoO][\da-fA-F_]+|\d[\d_.,]*[eE][+-]?\d.*|\d+(?:\.\d+){2,}|[nN]a[nN])")
_POWER = re.compile(r"(?:\^|\*\*)\s*")
_NUMERIC_POWER = re.compile(r"[\d)}!]\s*(?:\^|\*\*)(?!\s*\{?\s*[a-zA-Z])")
_EXPANDING = re.compile(r"!|\\[dt]?binom|\\choose|\\sum|\\prod")
_NESTED_FACTORIAL = re.compile(r"!\s*!|\([^a-zA-Z]*\)\s*!|\{[^a-zA-Z]*\}\s*!")
_UNBOUNDED = re.compile(r"\\(?:i*int|oint|lim)(?![a-zA-Z])")


def plain_number(text: str) -> str:
    """Return a number as LaTeX has it: 1000 for 1e3 and for 1 000. Return other texts unchanged."""
    if mixed := _MIXED.fullmatch(text):
        return rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    try:
        number = Decimal(re.sub(r"[^\d.+-]", "", text) if _GROUPED.fullmatch(text) else text)
    except InvalidOperation:
        return text
    return f"{number:f}" if number.is_finite() and abs(number.adjusted()) < _MOST_DIGITS else text


def plain_numbers_within(text: str) -> str:
    """Return a text with numbers such as 1e3 as LaTeX has them, and without the asterisks of Markdown's **bold**."""
    text = re.sub(r"(?<![\w)])\*\*([^*\n]+)\*\*(?![\w(])", r"\1", text)
    return re.sub(r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d+(?!\w)", lambda number: plain_number(number[0]), text)


def misread_number(text: str) -> bool:
    """True if a text looks like a number, such as 0x10, and math-verify would read it as something else."""
    return plain_number(text) == text and bool(_NUMBER_LIKE.fullmatch(text))


def quickly_compared(text: str) -> bool:
    """True if math-verify compares a text in about the usual time. Texts that would need long, and a few others, do
    not pass."""
    depths = accumulate(((char in "([{") - (char in ")]}") for char in text), initial=0)
    return len(text) <= LONGEST and max(depths) <= _DEEPEST and not _UNBOUNDED.search(text) and numbers_stay_small(text)


def numbers_stay_small(text: str) -> bool:
    """True if no power, factorial, binomial, sum or product in a text can need long to compute."""
    plain = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", text)
    if _EXPANDING.search(plain) and (_NESTED_FACTORIAL.search(plain) or max(_numbers(plain), default=0) > _LARGEST):
        return False
    powers = list(_POWER.finditer(plain))
    of_numbers = len(powers) == 1 and not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", plain))
    for power in powers:
        of_group = re.search(r"[)}\]]\s*$", plain[: power.start()]) and not of_numbers
        exponent = _group(plain, power.end())
        if _POWER.match(plain, power.end() + len(exponent)) or _NUMERIC_POWER.search(exponent) or "!" in exponent:
            return False
        if math.prod(max(1, number) for number in _numbers(exponent)) > (_LARGEST_OF_GROUP if of_group else _LARGEST):
            return False
    return True


def _numbers(text: str) -> list[int]:
    return [int(digits[:LONGEST]) for digits in re.findall(r"\d+", text)]


def _group(text: str, start: int) -> str:
    """Return the group in brackets at `start`, else the digits there, else one character."""
    if text[start : start + 1] in ("{", "("):
        depth = 0
        for end in range(start, len(text)):
            depth += (text[end] in "({") - (text[end] in ")}")
            if depth == 0:
                return text[start : end + 1]
    match = re.compile(r"[+-]?\d+|.?", re.DOTALL).match(text, start)
    return match[0] if match else ""
