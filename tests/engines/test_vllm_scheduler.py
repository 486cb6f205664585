"""Outputs of vLLM's core that are held and sent together: no token, log-prob or end is lost or changes its place."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from qurl_ray.engines.vllm import scheduler as vllm_scheduler
from qurl_ray.engines.vllm.scheduler import HoldingAsyncScheduler, HoldingScheduler, _Holding


class Core:
    """A scheduler that is told what each step drew: (request, token, how it ended)."""

    vllm_config = SimpleNamespace(quant_config=None)

    def __init__(self, kinds):
        self.requests = {
            name: SimpleNamespace(request_id=name, sampling_params=SamplingParams(output_kind=kind))
            for name, kind in kinds.items()
        }

    def update_from_output(self, drawn, _):
        outputs = []
        for name, token, ended in drawn:
            logprobs = LogprobsLists(np.array([[token]]), np.array([[-token / 8]]), np.array([token + 1]))
            outputs.append(EngineCoreOutput(name, [token], new_logprobs=logprobs, finish_reason=ended))
            if ended is not None:
                del self.requests[name]
        return {0: EngineCoreOutputs(outputs=outputs)}

    def finish_requests(self, names, status):
        return [self.requests.pop(name) for name in names]


class Held(_Holding, Core):
    pass


def sent(scheduler, *drawn):
    """(request, tokens, log-probs, ranks, how it ended) of what a step sends."""
    (client,) = scheduler.update_from_output(drawn, None).values()
    return [
        (
            one.request_id,
            one.new_token_ids,
            one.new_logprobs.logprobs[:, 0].tolist(),
            one.new_logprobs.sampled_token_ranks.tolist(),
            one.finish_reason,
        )
        for one in client.outputs
    ]


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(vllm_scheduler.time, "monotonic", lambda: now.s)
    return now


WHOLE, GROWING = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


def test_tokens_of_whole_answers_are_sent_together_in_their_order(clock):
    scheduler = Held({"a": WHOLE, "b": WHOLE})
    assert sent(scheduler, ("a", 1, None)) == [("a", [1], [-1 / 8], [2], None)]  # the first step sends
    clock.s += vllm_scheduler.HELD_S / 4
    assert sent(scheduler, ("a", 2, None), ("b", 5, None)) == []
    assert sent(scheduler, ("a", 3, None), ("b", 6, None)) == []
    clock.s += vllm_scheduler.HELD_S
    assert sent(scheduler, ("a", 4, None), ("b", 7, None)) == [
        ("a", [2, 3, 4], [-2 / 8, -3 / 8, -4 / 8], [3, 4, 5], None),
        ("b", [5, 6, 7], [-5 / 8, -6 / 8, -7 / 8], [6, 7, 8], None),
    ]


def test_an_answer_that_ends_is_sent_at_once_and_the_others_wait(clock):
    scheduler = Held({"a": WHOLE, "b": WHOLE})
    sent(scheduler, ("a", 1, None), ("b", 1, None))
    assert sent(scheduler, ("a", 2, None), ("b", 2, None)) == []
    assert sent(scheduler, ("a", 3, FinishReason.STOP), ("b", 3, None)) == [
        ("a", [2, 3], [-2 / 8, -3 / 8], [3, 4], FinishReason.STOP)
    ]
    assert sent(scheduler, ("b", 4, FinishReason.LENGTH))[0][1] == [2, 3, 4]


def test_answers_that_are_read_as_they_grow_are_never_held(clock):
    scheduler = Held({"a": GROWING})
    assert [sent(scheduler, ("a", token, None))[0][1] for token in range(5)] == [[0], [1], [2], [3], [4]]


def test_what_is_held_of_an_aborted_answer_goes_to_no_other_one(clock):
    scheduler = Held({"a": WHOLE, "b": WHOLE})
    sent(scheduler, ("a", 1, None), ("b", 1, None))
    assert sent(scheduler, ("a", 2, None), ("b", 2, None)) == []
    scheduler.finish_requests(["a"], None)
    clock.s += vllm_scheduler.HELD_S
    assert sent(scheduler, ("b", 3, None)) == [("b", [2, 3], [-2 / 8, -3 / 8], [3, 4], None)]
    assert scheduler._held == {}


def test_both_of_vllms_schedulers_have_what_is_overridden():
    for scheduler in (HoldingScheduler, HoldingAsyncScheduler):
        vllms = scheduler.__mro__[2]
        assert vllms.__module__.startswith("vllm.")
        assert callable(vllms.update_from_output)
        assert callable(vllms.finish_requests)
