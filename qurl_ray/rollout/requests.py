"""From problems to requests, with seeds that every process derives alike; what comes back, checked and continued."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

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
        EngineError: prompt and answer of a request, with what was drawn before, do not fit `context` tokens.
    """
    if held != version:
        found = "unverified weights" if held is None else f"weights {held}"
        raise StaleWeights(f"engine holds {found}, caller wants {version}")
    for request in requests:
        prompt, new = len(request.prompt_ids) - request.drawn, request.drawn + request.sampling.max_new_tokens
        if prompt < 1 or new <= request.drawn or prompt + new > context:
            raise EngineError(f"{request.uid}: {prompt} prompt + {new} new tokens do not fit the context of {context}")


def continued(request: Request, part: Completion) -> Request:
    """The request that goes on where `part`, which was cut short, ends. Its prompt ends with what was drawn: keys and
    values are computed anew, through the weights that go on."""
    drawn = len(part.token_ids)
    return replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, part.token_ids]),
        drawn=request.drawn + drawn,
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - drawn),
    )


def joined(parts: Sequence[Completion]) -> Completion:
    """The answer that was drawn in parts, each of a request that continues the part before."""
    if len(parts) == 1:
        return parts[0]
    return Completion(
        uid=parts[0].uid,
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        finish=parts[-1].finish,
    )


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
