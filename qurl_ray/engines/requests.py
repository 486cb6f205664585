"""Requests for problems, with seeds that every process derives alike; checks and continuation of completions."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from qurl_ray.errors import EngineError, StaleWeights
from qurl_ray.types import Completion, Problem, Request, SamplingParams

_PROBES = 2  # least number of answers: two rows take an engine as long as one
_PROBE_PROMPT, _PROBE_ANSWER = 24, 16  # tokens


def make_requests(
    problems: Sequence[Problem],
    encode: Callable[[Problem], np.ndarray],
    *,
    samples: int,
    sampling: SamplingParams,
    seed: int,
    salt: str,
) -> list[Request]:
    """Return `samples` requests per problem, adjacent to each other.

    Args:
        encode: function of a problem that returns its prompt as int32 token ids.
        seed: seed of the run. The seed of a request is derived from it, the salt, and the indices of problem and
            sample: a problem that occurs twice is answered differently.
        salt: distinguishes these draws from others of the same problem, for example by the step.
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


def probe_requests(
    problem: Problem,
    encode: Callable[[Problem], np.ndarray],
    *,
    tokens: int,
    longest: int,
    temperature: float = 1.0,
    seed: int,
) -> list[Request]:
    """Return the requests that engines answer after every sync, for comparison with the learner.

    At least `tokens` tokens are drawn from the whole distribution, in answers of at most `longest`, after the beginning
    of the problem's prompt. Prompt and answers are short: longer ones would show no more and take longer.
    """
    each = max(1, min(tokens // _PROBES, longest, _PROBE_ANSWER))
    sampling = SamplingParams(temperature=temperature, max_new_tokens=each, ignore_eos=True)
    samples = max(_PROBES, -(-tokens // each))
    whole = make_requests([problem], encode, samples=samples, sampling=sampling, seed=seed, salt="probe")
    return [replace(request, prompt_ids=request.prompt_ids[:_PROBE_PROMPT]) for request in whole]


def check_requests(requests: Sequence[Request], *, held: int | None, version: int, context: int) -> None:
    """Check that an engine that holds weights `held` (None: unverified ones) may answer these requests.

    Raises:
        StaleWeights: it does not hold `version`.
        EngineError: prompt and answer of a request, with what was drawn before, do not fit `context` tokens.
    """
    if held != version:
        weights = "unverified weights" if held is None else f"weights {held}"
        raise StaleWeights(f"engine holds {weights}, caller wants {version}")
    for request in requests:
        drawn = request.drawn - request.elsewhere
        prompt, new = len(request.prompt_ids) - drawn, drawn + request.sampling.max_new_tokens
        if prompt < 1 or new <= drawn or prompt + new > context:
            raise EngineError(f"{request.uid}: {prompt} prompt + {new} new tokens do not fit the context of {context}")


def continued(request: Request, part: Completion) -> Request:
    """Return the request that resumes where `part`, which was cut short, ends. Its prompt ends with the drawn tokens:
    their keys and values are computed again, with the weights then in use."""
    drawn = len(part.token_ids)
    return replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, part.token_ids]),
        drawn=request.drawn + drawn,
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - drawn),
    )


def joined(parts: Sequence[Completion]) -> Completion:
    """Join the parts of an answer: each holds the tokens drawn after the part before, or those of an
    environment."""
    if len(parts) == 1:
        return parts[0]
    masks = [np.ones(len(part.token_ids), dtype=bool) if part.mask is None else part.mask for part in parts]
    return Completion(
        uid=parts[0].uid,
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        mask=None if all(part.mask is None for part in parts) else np.concatenate(masks),
        finish=parts[-1].finish,
        drafted=sum(part.drafted for part in parts),
        agreed=sum(part.agreed for part in parts),
        routes=parts[-1].routes,  # of all tokens: what came before was its prompt
    )


def check_logprobs(completions: Sequence[Completion]) -> None:
    """Raise EngineError if a token's log-prob is not finite: what computed it is broken."""
    broken = [c.uid for c in completions if not np.isfinite(c.logprobs).all()]
    if broken:
        raise EngineError(
            f"log-probs of {len(broken)} of {len(completions)} answers are not finite, that of {broken[0]} first: "
            "the engine's weights or its kernel are broken"
        )


def derive_seed(*parts: object) -> int:
    """Return 64 bits derived from the parts; the same in every process and Python version."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
