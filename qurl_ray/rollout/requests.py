"""From problems to requests, with seeds that every process derives alike; and a look at what comes back."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from qurl_ray.errors import EngineError
from qurl_ray.types import Completion, Problem, Request, SamplingParams


def make_requests(
    problems: Sequence[Problem],
    encode: Callable[[Problem], np.ndarray],
    *,
    samples: int,
    sampling: SamplingParams,
    seed: int,
    salt: str,
) -> list[Request]:
    """`samples` requests per problem, neighbours of each other.

    Args:
        encode: prompt of a problem as int32 token ids.
        seed: of the run. A draw's own seed comes from it, the salt, the problem's place and the sample's: a problem
            that is drawn twice is answered differently.
        salt: what sets these draws apart from others of the same problem, such as the step.
    """
    return [
        Request(
            uid=f"{problem.uid}/{sample}",
            prompt_ids=prompt,
            seed=derive_seed(seed, salt, place, sample),
            sampling=sampling,
        )
        for place, (problem, prompt) in enumerate(zip(problems, map(encode, problems), strict=True))
        for sample in range(samples)
    ]


def check_logprobs(completions: Sequence[Completion]) -> None:
    """Raise EngineError if a token's log-prob is not finite: whatever made it is broken."""
    broken = [c.uid for c in completions if not np.isfinite(c.logprobs).all()]
    if broken:
        raise EngineError(
            f"log-probs of {len(broken)} of {len(completions)} answers are not finite, that of {broken[0]} first: "
            "the engine's weights or its kernel are broken"
        )


def derive_seed(*parts: object) -> int:
    """64 bits from the parts; the same in every process and Python version."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
