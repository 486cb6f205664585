"""A problem to judge answers to, and what tests look at in its verdicts."""

from collections.abc import Sequence

from qurl_ray.types import Problem, Verdict

PROBLEM = Problem(uid="train-0", prompt="1+1=", answer="2")


def statuses(verdicts: Sequence[Verdict]) -> list[tuple[float, str]]:
    return [(verdict.reward, verdict.status) for verdict in verdicts]
