r"""Reward functions of the package: (answer, problem) -> reward.

An answer that was cut off before its end token (problem.meta["truncated"]) gets 0, because the beginning of a wrong
answer may be the correct answer. A closed \boxed{...} is complete nevertheless, and the functions that look for boxes
judge it.

On hostile answers they may hang or use too much memory (sympy does both); run them in a VerifierProcess.
"""

import functools
import json
import re
from typing import Any

from qurl_ray.rewards.entries import unpack
from qurl_ray.types import Problem


def exact(answer: str, problem: Problem) -> float:
    """1 if the whole answer is the expected text, up to surrounding white space; else 0."""
    return float(not problem.meta.get("truncated") and answer.strip() == problem.answer.strip())


def last_number(answer: str, problem: Problem) -> float:
    """1 if the last integer of the answer is the expected one; else 0. Zeros on its left do not count."""
    found = re.findall(r"-?\d+", answer)
    return float(not problem.meta.get("truncated") and bool(found) and int(found[-1]) == int(problem.answer))


def math_verify(answer: str, problem: Problem) -> float:
    r"""1 if the answer equals the expected one as mathematics; else 0.

    The expected answer may be bare ("1/2"), GSM8K style ("... #### 42"), or hold \boxed{} or $...$. An answer that
    cannot be parsed gets 0. Letters are symbols to math-verify, which multiply: "ab" equals "ba".

    Raises:
        ValueError: the expected answer itself cannot be parsed.
    """
    if _incomplete(answer, problem):
        return 0.0
    from math_verify import parse, verify

    expected = problem.answer.rpartition("####")[2].strip()
    if answer.strip() == expected:  # also needed for plain words, which are no mathematics and would score 0
        return 1.0
    # Its own time-outs use signals, which fail in any thread but the main one; so the process has the deadline.
    gold = parse(_as_latex(expected), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not gold:
        raise ValueError(f"math-verify cannot parse the expected answer {expected[:80]!r} of {problem.uid}")
    found = parse(answer, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return float(verify(gold, found, timeout_seconds=None))


def reasoning_gym(answer: str, problem: Problem) -> float:
    r"""Score of the data set's own scorer, for the last \boxed{} if there is one, else for the whole answer.

    problem.meta holds `dataset` (its name), `params` (its settings, seed and size) and `entry` (packed).
    """
    if _incomplete(answer, problem):
        return 0.0
    meta = problem.meta
    dataset = _gym_dataset(meta["dataset"], json.dumps(meta["params"], sort_keys=True))
    boxed = last_boxed(answer)
    return float(dataset.score_answer(answer.strip() if boxed is None else boxed.strip(), unpack(meta["entry"])))


def reasoning_gym_boxed(answer: str, problem: Problem) -> float:
    r"""Same as `reasoning_gym`, but an answer without \boxed{...} gets 0."""
    return 0.0 if last_boxed(answer) is None else reasoning_gym(answer, problem)


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...}, with balanced braces; None if there is none, or if it is not closed."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start:end]
    return None


def _incomplete(answer: str, problem: Problem) -> bool:
    return bool(problem.meta.get("truncated")) and last_boxed(answer) is None


def _as_latex(expected: str) -> str:
    r"""Wrap bare LaTeX ("x^2+1") in \boxed{}, else it is not recognised. "$18" is money; "$x$" is LaTeX already."""
    marked = r"\boxed" in expected or expected.count("$") >= 2
    return expected if marked else rf"\boxed{{{expected}}}"


@functools.lru_cache(maxsize=8)
def _gym_dataset(name: str, params_json: str) -> Any:
    import reasoning_gym as gym

    return gym.create_dataset(name, **json.loads(params_json))
