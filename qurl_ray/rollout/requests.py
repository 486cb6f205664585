"""From problems to requests, with seeds that every process derives alike; and a look at what comes back."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from qurl_ray.errors import EngineError, StaleWeights
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


def check_requests(requests: Sequence[Request], *, held: int | None, version: int, context: int) -> None:
    """Whether an engine that holds weights `held` (None: unverified ones) may answer these.

    Raises:
        StaleWeights: it does not hold `version`.
        EngineError: prompt and answer of a request do not fit `context` tokens.
    """
    if held != version:
        found = "unverified weights" if held is None else f"weights {held}"
        raise StaleWeights(f"engine holds {found}, caller wants {version}")
    for request in requests:
        prompt, new = len(request.prompt_ids), request.sampling.max_new_tokens
        if not prompt or new < 1 or prompt + new > context:
            raise EngineError(f"{request.uid}: {prompt} prompt + {new} new tokens do not fit the context of {context}")


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
