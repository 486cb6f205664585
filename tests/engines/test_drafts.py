"""Drafts by codes, verified by full precision: the bits of an engine without drafts, whatever the drafts are."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qurl_ray.engines.requests import continued
from qurl_ray.engines.torch.batch import RunningBatch
from qurl_ray.engines.torch.drafts import MOST, Costs, Drafter, Line, best_count
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.types import Adapters, Completion, Request, SamplingParams
from tests.conftest import requests_for
from tests.engines.test_batch import every_step
from tests.engines.test_continued import KINDS, assert_equal
from tests.engines.test_decoder import KNOWN, MIXTURES, OTHERS, policy_of, random_requests
from tests.engines.test_torch_engine import weights_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.equal_bits]


@pytest.fixture(autouse=True)
def any_count(monkeypatch):
    """The number of drafts changes from pass to pass, as it may."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(Drafter, "count", lambda self, rows, most: int(rng.integers(0, min(most, 5) + 1)))


def engines_of(spec, model, *, slots: int = 16, **options) -> tuple[TorchEngine, TorchEngine]:
    """An engine without drafts and one with, in full precision."""
    both = TorchEngine(spec, slots=slots, **options), TorchEngine(spec, slots=slots, drafts=True, **options)
    for engine in both:
        engine.load(*weights_of(model, "none"))
    return both


def agreement(completions: list[Completion]) -> float:
    return sum(c.agreed for c in completions) / sum(c.drafted for c in completions)


@pytest.mark.parametrize("kv_cache", ["full", "fp8"])
@pytest.mark.parametrize("slots", [1, 3, 16])
def test_answers_of_all_kinds_are_those_without_drafts(tiny_spec, model, slots, kv_cache):
    plain, drafting = engines_of(tiny_spec, model, slots=slots, kv_cache=kv_cache)
    requests = [
        replace(request, uid=f"{kind}/{request.uid}")
        for kind, sampling in enumerate(KINDS)
        for request in random_requests(4, seed=kind, **sampling)
    ]
    requests = [replace(r, prompt_ids=r.prompt_ids % model.config.vocab_size) for r in requests]
    expected, found = (engine.generate(requests, version=1) for engine in (plain, drafting))
    assert_equal(found, expected)
    assert {c.finish for c in found} == {"length", "stop"}
    assert agreement(found) > 0.6
    assert sum(c.agreed for c in found) < sum(len(c.token_ids) for c in found)
    assert not any(c.drafted for c in expected)


@pytest.mark.parametrize(
    "architecture",
    [
        "llama with biases",
        "llama, tied",
        "qwen2",
        "qwen3, multi-query",
        "qwen3_moe, some layers dense",
        "mixtral",
        "gemma2",
        "mistral with a window",
    ],
)
def test_models_of_all_kinds_and_their_routes(tmp_path, architecture):
    policy = policy_of(*(KNOWN | MIXTURES | OTHERS)[architecture], tmp_path)
    routes = architecture in MIXTURES
    plain, drafting = engines_of(policy.spec, policy.model, slots=3, routes=routes)
    requests = random_requests(8, ignore_eos=True)
    expected, found = (engine.generate(requests, version=1) for engine in (plain, drafting))
    assert_equal(found, expected)
    assert agreement(found) > 0.5
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.routes, other.routes)
        assert (one.routes is not None) == routes


@pytest.mark.parametrize("right", [True, False])
def test_drafts_that_are_all_right_or_all_wrong_change_the_number_of_passes_alone(
    tiny_spec, model, tokenizer, monkeypatch, right
):
    plain, drafting = engines_of(tiny_spec, model, slots=4)
    requests = requests_for(tokenizer, 4, 1, max_new_tokens=13, ignore_eos=True)
    expected = plain.generate(requests, version=1)
    answers = torch.tensor(np.array([c.token_ids for c in expected]), dtype=torch.int64)
    monkeypatch.setattr(Drafter, "count", lambda self, rows, most: min(most, 3))

    def draft(batch, logits_BV, ahead):
        rows = torch.from_numpy(batch.running())
        own = answers[rows, torch.from_numpy(batch._drawn[batch.running()] + ahead)]
        return own if right else (own + 1) % model.config.vocab_size

    passes = []
    verify = RunningBatch.verify
    monkeypatch.setattr(RunningBatch, "draft", draft)
    monkeypatch.setattr(RunningBatch, "verify", lambda *args: passes.append(1) or verify(*args))
    found = drafting.generate(requests, version=1)
    assert_equal(found, expected)
    assert len(passes) == (3 if right else 11)  # 12 tokens behind the prompt's; the last pass has nothing to draft
    assert agreement(found) == right


def test_turns_after_kept_keys_are_those_without_drafts(tiny_spec, model, tokenizer):
    """Keys that are kept are the verified ones, and none of a draft that was wrong."""
    plain, drafting = engines_of(tiny_spec, model, slots=3, kept_bytes=1 << 30)
    asked = [replace(r, continues=True) for r in requests_for(tokenizer, 5, 1, max_new_tokens=30, stop_ids=(3, 4))]
    said = np.array([5, 6, 7], dtype=np.int32)
    rows = asked
    for _ in range(3):
        short = [replace(r, sampling=replace(r.sampling, max_new_tokens=7)) for r in rows]
        expected, found = (engine.generate(short, version=1) for engine in (plain, drafting))
        assert_equal(found, expected)
        assert drafting._kept._held == plain._kept._held > 0
        for uid, kept in plain._kept._kept.items():
            other = drafting._kept._kept[uid]
            assert torch.equal(kept.keys, other.keys)
            assert torch.equal(kept.values, other.values)
        rows = [continued(row, part) for row, part in zip(rows, found, strict=True)]
        rows = [replace(row, prompt_ids=np.concatenate([row.prompt_ids, said])) for row in rows]


def test_cancelled_at_any_step_the_rest_is_drawn_as_if_undisturbed(tiny_spec, model, tokenizer, monkeypatch):
    plain, drafting = engines_of(tiny_spec, model, slots=3)
    requests = requests_for(tokenizer, 5, 2, max_new_tokens=24)
    expected = plain.generate(requests, version=1)
    for step in (1, 2, 4, 7):
        with monkeypatch.context() as patch:
            uids = [request.uid for request in requests[::2]]
            every_step(drafting, patch, lambda n, at=step, uids=uids: drafting.cancel(uids) if n == at else None)
            parts = drafting.generate(requests, version=1)
        assert any(part.finish == "cancelled" for part in parts)
        for request, part, whole in zip(requests, parts, expected, strict=True):
            count = len(part.token_ids)
            np.testing.assert_array_equal(part.logprobs, whole.logprobs[:count])
            if part.finish == "cancelled":
                (rest,) = drafting.generate([continued(request, part)], version=1)
                np.testing.assert_array_equal(rest.token_ids, whole.token_ids[count:])
                np.testing.assert_array_equal(rest.logprobs, whole.logprobs[count:])


def test_a_deadline_leaves_what_was_drawn_before(tiny_spec, model, tokenizer, monkeypatch):
    plain, drafting = engines_of(tiny_spec, model)
    requests = requests_for(tokenizer, 3, 1, max_new_tokens=24, ignore_eos=True)
    expected, now = plain.generate(requests, version=1), iter([0.0, 0.0, 0.0, 9.0])
    monkeypatch.setattr("qurl_ray.engines.torch.engine.time.monotonic", lambda: next(now))
    for part, whole in zip(drafting.generate(requests, version=1, deadline_s=5.0), expected, strict=True):
        assert part.finish == "deadline"
        assert 0 < len(part.token_ids) < 24
        np.testing.assert_array_equal(part.logprobs, whole.logprobs[: len(part.token_ids)])


@pytest.mark.parametrize("named", [False, True])
def test_with_adapters(tiny_spec, model, tokenizer, named):
    """A model's own adapter is in its codes. Those by name are not, and change drafts alone."""
    from qurl_ray.policy.adapters import SavedAdapter, add_adapters

    adapters = Adapters(rank=2, alpha=8.0, targets=("all_linear",))
    add_adapters(model, adapters)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)), std=0.3)
    own = {name: parameter.detach() for name, parameter in model.named_parameters() if "lora_" in name}
    requests = requests_for(tokenizer, 4, 2, max_new_tokens=16, ignore_eos=True)
    if named:
        for name in own:
            path, _, _ = name.rpartition(".lora_")
            if hasattr(model.get_submodule(path), "lora_A"):
                del model.get_submodule(path).lora_A, model.get_submodule(path).lora_B
        plain, drafting = engines_of(tiny_spec, model)
        saved = SavedAdapter(adapters=adapters, parameters=own, base="")
        for engine in (plain, drafting):
            engine.put_adapter("a", saved, {})
        requests = [replace(r, adapter="a" if i % 2 else "") for i, r in enumerate(requests)]
    else:
        plain, drafting = engines_of(replace(tiny_spec, adapters=adapters), model)
    expected, found = (engine.generate(requests, version=1) for engine in (plain, drafting))
    assert_equal(found, expected)
    assert named or agreement(found) > 0.6


def test_drafts_come_from_the_weights_that_were_loaded_last(tiny_spec, model, tokenizer):
    _, drafting = engines_of(tiny_spec, model)
    assert drafting.kernels()
    assert all("for drafts" in kernel for kernel in drafting.kernels())
    requests = requests_for(tokenizer, 4, 2, max_new_tokens=24, ignore_eos=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7 if parameter.ndim == 2 else 1)
    drafting.load(*weights_of(model, "none", version=2))
    assert agreement(drafting.generate(requests, version=2)) > 0.6


def test_codes_are_not_drafted_for(tiny_spec, model, tokenizer):
    _, drafting = engines_of(tiny_spec, model)
    drafting.load(*weights_of(model, "int8", version=2))
    assert drafting._drafter._forward is None
    drafting.load(*weights_of(model, "none", version=3))
    assert any(isinstance(m, QuantizedLinear) for m in drafting._drafter._coded(drafting._model).modules())
    assert not any(isinstance(m, QuantizedLinear) for m in drafting._model.modules())


def test_weights_that_are_not_finite_are_told_by_log_probs_as_without_drafts(tiny_spec, model, tokenizer, monkeypatch):
    monkeypatch.undo()
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = torch.nan
        model.get_submodule("model.layers.0.mlp.up_proj").weight[0, 0] = torch.inf
    plain, drafting = engines_of(tiny_spec, model)
    requests = requests_for(tokenizer, 2, 1)
    for engine in (plain, drafting):
        assert not all(np.isfinite(c.logprobs).all() for c in engine.generate(requests, version=1))


# --- the batch ---------------------------------------------------------------------------------------------------


def test_a_row_keeps_what_agrees_and_the_next_token_and_ends_where_it_would_without_drafts():
    sampling = SamplingParams(max_new_tokens=5, stop_ids=(7,))
    requests = [
        Request(uid=str(i), prompt_ids=np.zeros(1, dtype=np.int32), seed=i, sampling=sampling) for i in range(4)
    ]
    batch = RunningBatch(requests, version=1)
    batch.admit(list(enumerate(requests)))
    batch.draw(certain([[1]] * 4)[:, 0])
    own = [[2, 3, 4, 5], [2, 3, 4, 5], [2, 7, 4, 5], [2, 3, 4, 5]]
    drafts = torch.tensor([[2, 3, 4], [2, 9, 4], [2, 7, 4], [8, 3, 4]])
    assert batch.verify(certain(own), drafts).tolist() == [4, 2, 2, 1]
    assert [batch.row_of(i)[1].tolist() for i in range(4)] == [[1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 7], [1, 2]]
    assert [index for _, index in batch.finished()] == [0, 2]
    assert [(c.drafted, c.agreed) for c in batch.completions()] == [(3, 3), (2, 1), (1, 1), (1, 0)]
    assert batch.left() == 3


def certain(tokens: list[list[int]]) -> torch.Tensor:
    """Logits that leave no choice."""
    return torch.full((*np.shape(tokens), 11), -1e9).scatter_(2, torch.tensor(tokens)[:, :, None], 0.0)


def test_a_draft_has_the_noise_of_its_place():
    """With the logits of the weights themselves, every draft is right."""
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True)
    requests = [
        Request(uid=str(i), prompt_ids=np.zeros(1, dtype=np.int32), seed=i, sampling=sampling, drawn=i)
        for i in range(6)
    ]
    logits = torch.randn(6, 5, 300, generator=torch.Generator().manual_seed(0))
    batch = RunningBatch(requests, version=1)
    batch.admit(list(enumerate(requests)))
    drafts = torch.stack([batch.draft(logits[:, place], place) for place in range(4)], dim=1)
    assert batch.verify(logits, drafts).tolist() == [5] * 6
    assert len({tuple(row) for row in drafts.tolist()}) == 6


# --- the number of drafts ----------------------------------------------------------------------------------------


FAST = Costs(draft=Line(start=0.3, each=0.02), verify=Line(start=1.0, each=0.03))


def test_the_number_of_drafts_by_hand():
    flat = Costs(draft=Line(start=0.5, each=0.0), verify=Line(start=1.0, each=0.0))
    # 1/1, 1.5/1.5, 1.75/2; 1.9/1.5, 2.71/2, 3.439/2.5, 4.0951/3, …
    assert best_count(0.5, 1, flat, 9) == 0
    assert best_count(0.9, 1, flat, 9) == 3
    assert best_count(0.9, 1, flat, 2) == 2
    assert best_count(0.9, 1, flat, 0) == 0


@given(st.floats(0.05, 0.99), st.integers(1, 64), st.integers(0, 20))
def test_more_agreement_gives_no_fewer_drafts_and_more_rows_no_more(right, rows, most):
    count = best_count(right, rows, FAST, most)
    assert 0 <= count <= min(most, MOST)
    assert best_count(min(0.999, right + 0.01), rows, FAST, most) >= count
    assert best_count(right, 2 * rows, FAST, most) <= count


def test_drafts_without_use_are_given_up_until_the_next_load(monkeypatch):
    monkeypatch.undo()
    drafter = Drafter(emulate=False)
    assert drafter.count(1, 9) == 0
    drafter._forward, drafter._costs = lambda *_: None, FAST
    assert drafter.count(1, 9) > 2
    assert drafter.count(512, 9) == 0
    for _ in range(300):
        drafter.learn(1, 0)
    assert drafter.count(1, 9) == 0
