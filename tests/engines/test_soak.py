"""Thousands of requests through a few slots: none is lost, mixed up or left behind, and nothing grows."""

import gc
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.types import Request, SamplingParams
from tests.engines.test_decoder import loaded, policy_of
from tests.engines.test_torch_engine import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")

CALLS, GROUPS, SAMPLES = 20, 250, 4  # 20 000 requests
KINDS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.2, "top_k": 20},
]


@pytest.fixture
def engine(tmp_path) -> TorchEngine:
    size = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    return loaded(policy_of(LlamaConfig, size | {"num_key_value_heads": 1}, tmp_path), "none", slots=48)


def asked(call: int) -> list[Request]:
    """Groups of one prompt each, of 1 to 30 tokens, in mixed order; 1 to 3 tokens to draw, some of which may stop."""
    rng = np.random.default_rng(call)
    requests = []
    for group in range(GROUPS):
        prompt = rng.integers(0, 131, size=rng.integers(1, 31), dtype=np.int32)
        kind = KINDS[rng.integers(len(KINDS))]
        for sample in range(SAMPLES):
            sampling = SamplingParams(
                **kind, max_new_tokens=int(rng.integers(1, 4)), stop_ids=(3, 7), ignore_eos=bool(rng.integers(2))
            )
            uid = f"{call}-{group}/{sample}"
            requests.append(Request(uid=uid, prompt_ids=prompt, seed=int(rng.integers(2**63)), sampling=sampling))
    return [requests[i] for i in rng.permutation(len(requests))]


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.slow
def test_twenty_thousand_requests_leave_nothing_behind(engine, monkeypatch):
    rng = np.random.default_rng(0)
    finished, counts, widths, cache = Counter(), [], [], None
    own, steps = engine._forward, Counter()

    def forward(ids, positions, cache):
        steps["all"] += 1
        if steps["all"] == cancel_at:
            engine.cancel(gone)
        widths.append(len(ids))
        return own(ids, positions, cache)

    monkeypatch.setattr(engine, "_forward", forward)
    for call in range(CALLS):
        requests = asked(call)
        cancel_at = steps["all"] + 6 if call % 3 == 1 else -1
        gone = {r.uid for r in requests if rng.random() < 0.3} | {"nobody/0"}
        deadline_s = 0.02 if call % 7 == 3 else None
        completions = engine.generate(requests, version=1, deadline_s=deadline_s)
        assert [c.uid for c in completions] == [r.uid for r in requests]
        kinds = Counter(c.finish for c in completions)
        finished += kinds
        assert kinds["cancelled"] == 0 or call % 3 == 1
        assert kinds["deadline"] == 0 or deadline_s
        for request, completion in zip(requests, completions, strict=True):
            params, drawn = request.sampling, completion.token_ids.tolist()
            assert len(completion.logprobs) == len(drawn) <= params.max_new_tokens
            stopped = not params.ignore_eos and any(token in params.stop_ids for token in drawn)
            if completion.finish in ("cancelled", "deadline"):
                assert len(drawn) < params.max_new_tokens
                assert not stopped
            elif completion.finish == "stop":
                assert stopped
                assert not set(drawn[:-1]) & set(params.stop_ids)
            else:
                assert len(drawn) == params.max_new_tokens
                assert not stopped
        if call == 1:
            cache = engine._cache
        if call >= 1:
            assert engine._cache is cache  # made once, large enough for all that follows
            del completions, requests, request, completion, drawn
            counts.append(objects())
    assert sum(finished.values()) == CALLS * GROUPS * SAMPLES
    assert all(finished[kind] > 50 for kind in ("stop", "length", "cancelled", "deadline")), finished
    assert max(widths) == 48
    # Objects of the last calls are as many as those of the first; a leak of one a request would be thousands.
    assert max(counts[-5:]) < counts[0] + 300
    # All slots are still there: the next call fills each of them.
    widths.clear()
    cancel_at = -1
    requests = asked(999)
    together = engine.generate(requests, version=1)
    assert max(widths) == 48
    for i in rng.choice(len(requests), size=20, replace=False):
        assert_same(engine.generate([requests[i]], version=1), [together[i]])
    assert torch.cuda.is_available() or engine._cache is cache
