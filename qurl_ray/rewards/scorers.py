r"""Reward functions of the package: (answer, problem) -> reward.

All of them judge the same final answer (rewards.final): the last closed \boxed{...} after the reasoning, or all text
after the reasoning. An unfinished answer gets 0, because the beginning of a wrong answer may be the correct answer.

math-verify and the scorers of reasoning-gym may hang or use too much memory; run them in a VerifierProcess.
"""

import functools
import json
import re
from decimal import Decimal
from typing import Any

from qurl_ray.rewards.comparable import (
    LONGEST,
    misread_number,
    numbers_stay_small,
    plain_number,
    plain_numbers_within,
    quickly_compared,
)
from qurl_ray.rewards.entries import unpack
from qurl_ray.rewards.final import final_answer, last_boxed
from qurl_ray.types import Problem


def exact(answer: str, problem: Problem) -> float:
    r"""1 if the answer after its reasoning is the expected text, up to surrounding white space; else 0. A box counts as
    part of the text."""
    if problem.meta.get("truncated"):
        return 0.0
    final = final_answer(answer, problem)
    return float(final is not None and final.written == problem.answer.strip())


def last_number(answer: str, problem: Problem) -> float:
    """1 if the last integer of the final answer is the expected one; else 0. Zeros on its left do not count."""
    final = final_answer(answer, problem)
    integers = re.findall(r"-?\d+", final.text) if final else []
    return float(bool(integers) and Decimal(integers[-1]) == int(problem.answer))


def math_verify(answer: str, problem: Problem) -> float:
    r"""1 if the final answer equals the expected one as mathematics; else 0.

    The expected answer may be bare ("1/2"), GSM8K style ("... #### 42"), or hold \boxed{} or $...$. Numbers may be
    written as 1e3 or 1 000. An answer that cannot be parsed gets 0. So does one that would take long to compare
    (rewards.comparable), unless it is the expected text. Of an answer without a box, the last 500 characters count.
    Letters are symbols to math-verify, which multiply: "ab" equals "ba".

    Raises:
        ValueError: the expected answer itself cannot be parsed.
    """
    final = final_answer(answer, problem)
    if final is None:
        return 0.0
    expected = _expected(problem.answer)
    if final.text == expected:  # also needed for plain words, which are no mathematics and would score 0
        return 1.0
    text = final.text if final.boxed else plain_numbers_within(final.text[-LONGEST:])  # a search of quadratic time
    if compared_as_text(expected) or not quickly_compared(text):
        return 0.0
    from math_verify import parse, verify

    # Its own time-outs use signals, which fail in any thread but the main one; so the process has the deadline.
    # Bare LaTeX ("x^2+1") is recognised only in \boxed{}. "$18" is money; "$x$" is LaTeX already.
    latex = expected if expected.count("$") >= 2 else _boxed(expected)
    gold = parse(latex, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not gold:
        raise ValueError(f"math-verify cannot parse the expected answer {expected[:80]!r} of {problem.uid}")
    said = _boxed(text) if final.boxed else text
    return float(verify(gold, parse(said, parsing_timeout=None), timeout_seconds=None))  # pyright: ignore[reportArgumentType]


def compared_as_text(expected: str) -> bool:
    """True if `math_verify` accepts nothing but the same text: it would read a number as symbols, or need long."""
    text = _expected(expected)
    return misread_number(text) or not quickly_compared(text)


def reasoning_gym(answer: str, problem: Problem) -> float:
    r"""Score of the data set's own scorer, for the final answer. An answer with powers or factorials that would take
    long to compute gets 0, since some of these scorers compute them.

    problem.meta holds `dataset` (its name), `params` (its settings, seed and size) and `entry` (packed).
    """
    final = final_answer(answer, problem)
    if final is None or not (numbers_stay_small(final.text) or final.text == problem.answer):
        return 0.0
    meta = problem.meta
    dataset = _gym_dataset(meta["dataset"], json.dumps(meta["params"], sort_keys=True))
    return float(dataset.score_answer(final.text, unpack(meta["entry"])))


def reasoning_gym_boxed(answer: str, problem: Problem) -> float:
    r"""Same as `reasoning_gym`, but a final answer without \boxed{...} gets 0."""
    final = final_answer(answer, problem)
    return reasoning_gym(answer, problem) if final and final.boxed else 0.0


def _expected(answer: str) -> str:
    r"""Return the expected answer: what follows ####, in the last box if there is one."""
    text = answer.rpartition("####")[2].strip()
    boxed = last_boxed(text)
    return text if boxed is None else boxed.strip()


def _boxed(text: str) -> str:
    return rf"\boxed{{{plain_number(text)}}}"


@functools.lru_cache(maxsize=8)
def _gym_dataset(name: str, params_json: str) -> Any:
    import reasoning_gym as gym

    return gym.create_dataset(name, **json.loads(params_json))
