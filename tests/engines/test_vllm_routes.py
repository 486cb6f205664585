"""Routes of vLLM's tokens: those of the torch engine, however vLLM divides, caches and repeats the work."""

from dataclasses import replace

import numpy as np
import pytest

from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.types import Request, SamplingParams
from qurl_ray.weights.local import load_into, send_into
from qurl_ray.weights.stream import Publisher
from tests.engines.test_vllm_experts import Remote
from tests.learner.test_experts import mixture as mixture  # a fixture
from tests.learner.test_experts import mixture_spec as mixture_spec  # a fixture

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")

BLOCK, CONTEXT, SLOTS = 32, 128, 4
NEW = 44
SHARED = 2 * BLOCK + 3
BLOCKS = 9
"""One is vLLM's own. Four answers of more than three blocks, which share two, do not fit into the others."""


@pytest.fixture(scope="module")
def spec(mixture_spec):
    return replace(mixture_spec, overrides={"max_position_embeddings": CONTEXT})


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["experts", "weights"])
def engine(request, spec):
    """With vLLM's smallest room: no two prompts fit into a pass, and so few blocks that answers are preempted."""
    token = 2 * 2 * 2 * 32 * 4  # bytes of keys and values: two layers, two heads of 32 numbers
    with Remote(
        spec,
        slots=SLOTS,
        threads=1,
        timeout_s=240,
        routes=True,
        route_weights=request.param,
        kv_cache_bytes=BLOCKS * BLOCK * token,
        settings={"block_size": BLOCK, "max_num_batched_tokens": CONTEXT},
    ) as process:
        yield process


def requests_of(count: int, seed: int, **sampling) -> list[Request]:
    """Requests whose prompts begin alike, and have different lengths."""
    rng = np.random.default_rng(seed)
    first = rng.integers(3, 17, size=SHARED)
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    return [
        Request(
            uid=str(index),
            prompt_ids=np.concatenate([first, rng.integers(3, 17, size=1 + index)]).astype(np.int32),
            seed=index,
            sampling=replace(params, **sampling),
        )
        for index in range(count)
    ]


def check_routes(spec, mixture, requests, completions) -> None:
    """Compare routes with those of the torch engine, for which all these tokens are a prompt."""
    one = SamplingParams(max_new_tokens=1, ignore_eos=True)
    whole = [
        replace(request, prompt_ids=np.concatenate([request.prompt_ids, completion.token_ids]), sampling=one)
        for request, completion in zip(requests, completions, strict=True)
    ]
    with_weights = completions[0].routes.dtype == np.float32
    reference = TorchEngine(spec, slots=8, routes=True, route_weights=with_weights)
    load_into(reference, mixture.named_parameters(), None, quantized={})
    for completion, expected in zip(completions, reference.generate(whole, version=1), strict=True):
        found, wanted = completion.routes, expected.routes[:-1]
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        same = (found[..., :2] == wanted[..., :2]).all(-1)
        assert same.mean() > 0.99  # a route may hang on a last bit
        np.testing.assert_allclose(found[same], wanted[same], atol=1e-4)


def test_routes_are_those_of_the_torch_engine(engine, spec, mixture):
    send_into(Publisher({}), engine, mixture.named_parameters(), None, version=1)
    for seed in range(2):  # the second prompts find other routes in the slots of the first
        requests = requests_of(9, seed)
        completions = engine.call("generate", requests, version=1)
        assert {c.finish for c in completions} == {"length"}
        check_routes(spec, mixture, requests, completions)
    assert engine.call("cached_tokens", requests[-1].prompt_ids.tolist()) == 2 * BLOCK


def test_prompts_that_do_not_fit_into_one_pass_together_are_answered(engine, spec, mixture):
    """A part of a prompt would have vLLM turn back a generator, which a CPU's cannot."""
    send_into(Publisher({}), engine, mixture.named_parameters(), None, version=2)
    rng, sampling = np.random.default_rng(4), SamplingParams(max_new_tokens=3, ignore_eos=True)
    prompts = rng.integers(3, 17, size=(SLOTS, 48)).astype(np.int32)  # blocks for all, but tokens for two
    requests = [Request(uid=str(i), prompt_ids=ids, seed=i, sampling=sampling) for i, ids in enumerate(prompts)]
    check_routes(spec, mixture, requests, engine.call("generate", requests, version=2))


def test_answers_that_are_cancelled_have_the_routes_of_the_tokens_that_they_return(engine, spec, mixture):
    send_into(Publisher({}), engine, mixture.named_parameters(), None, version=3)
    requests = requests_of(9, seed=5)
    ticket = engine.start("generate", requests, version=3)
    engine.call("drawing", 2)
    engine.call("cancel", [request.uid for request in requests])
    pairs = [pair for pair in zip(requests, engine.result(ticket), strict=True) if len(pair[1].token_ids)]
    assert any(completion.finish == "cancelled" for _, completion in pairs)
    check_routes(spec, mixture, *zip(*pairs, strict=True))
