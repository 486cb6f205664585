"""Cost of hostile answers: python benchmarks/hostile_answers.py (about a minute).

Judges 512 answers with math_verify in a verifier's process, as a training step does. In every other round 5 % of them
are hostile: towers of powers, thousands of nested parentheses, factorials of factorials, long repetitions. Results are
in benchmarks/results/hostile_answers.json.
"""

import json
import random
import statistics
import time
from pathlib import Path
from typing import Annotated

import typer
from shared import RESULTS, machine

from qurl_ray.rewards.process import VerifierProcess
from qurl_ray.types import Problem

ANSWERS, SHARE = 512, 0.05
HOSTILE = (
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
    r"\boxed{((9!)!)!}",
    r"\boxed{\binom{10000000}{5000000}}",
    r"\boxed{(9^{9999})^{9999}}",
    r"\boxed{(x+y+z)^{999}}",
    r"\boxed{\int_0^1 e^{x^2} \sin(x^3) dx}",
    r"\boxed{" + "9" * 5000 + "}",
    r"\boxed{" + r"\frac{1}{1+" * 500,
    "<think>" + r"\boxed{1} " * 5000,
    "$ " * 8000,
    "9**9**9**9",
)


def answer(index: int, chance: random.Random) -> tuple[str, Problem]:
    """Return a usual answer, right or wrong."""
    top, bottom = chance.randrange(1, 10_000), chance.randrange(2, 10_000)
    said = rf"So we divide {top} by {bottom}, and get \boxed{{\frac{{{top}}}{{{bottom}}}}}."
    wanted = f"{2 * top}/{2 * bottom}" if chance.random() < 0.5 else f"{top + 1}/{bottom}"
    return said, Problem(uid=str(index), prompt="?", answer=wanted)


def seconds(verifier: VerifierProcess, share: float, seed: int) -> float:
    """Return the time for a step's answers, `share` of them hostile."""
    chance = random.Random(seed)
    items = [answer(index, chance) for index in range(ANSWERS)]
    for number, place in enumerate(chance.sample(range(ANSWERS), round(share * ANSWERS))):
        items[place] = (HOSTILE[number % len(HOSTILE)], items[place][1])
    started = time.perf_counter()
    verdicts = verifier.judge_many(items)
    took = time.perf_counter() - started
    assert all(verdict.status == "ok" for verdict in verdicts), {verdict.detail for verdict in verdicts}
    return took


def main(out: Annotated[Path, typer.Option()] = RESULTS / "hostile_answers.json", rounds: int = 7) -> None:
    """Measure both kinds of steps in turns, and write the medians."""
    took: dict[float, list[float]] = {0.0: [], SHARE: []}
    with VerifierProcess("math_verify", timeout_s=5.0) as verifier:
        seconds(verifier, 0.0, seed=0)  # imports sympy
        for seed in range(1, rounds + 1):
            for share, times in took.items():
                times.append(seconds(verifier, share, seed))
    usual, hostile = (statistics.median(times) for times in took.values())
    ratio = statistics.median(b / a for a, b in zip(*took.values(), strict=True))
    result = {"machine": machine(), "answers": ANSWERS, "hostile_share": SHARE, "rounds": rounds}
    result |= {"seconds": {"usual": usual, "with hostile answers": hostile}, "ratio": ratio}
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{ANSWERS} answers: {usual:.2f} s; with {SHARE:.0%} hostile ones {hostile:.2f} s, {ratio - 1:+.1%}")


if __name__ == "__main__":
    typer.run(main)
