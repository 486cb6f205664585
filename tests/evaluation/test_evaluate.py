"""Evaluating a saved policy, quantized here or before."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qurl_ray.config import RunConfig
from qurl_ray.config.environment import EnvironmentConfig
from qurl_ray.config.rollout import RolloutConfig
from qurl_ray.data.prompts import encode_prompt
from qurl_ray.data.tasks import load_task
from qurl_ray.engines.requests import make_requests
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.errors import ConfigError, DataError, EnvironmentFailed
from qurl_ray.evaluation.evaluate import Report, evaluate
from qurl_ray.policy.export import save_quantized
from qurl_ray.policy.save import save_policy
from qurl_ray.quant.formats import get_format
from qurl_ray.types import Completion, SamplingParams
from qurl_ray.weights.local import policy_in
from tests.conftest import taken

CONFIG = RunConfig.model_validate({"rollout": {"max_new_tokens": 4}, "evaluation": {"problems": 70}})


def report_of(policy, quantization: str | None = None) -> Report:
    return evaluate(
        CONFIG, policy, quantization=quantization, samples=2, temperature=1.0, progress=lambda done, total: None
    )


def figures(report: Report) -> tuple:
    return report.quantization, report.kernels, report.accuracy, report.avg_at_k, report.pass_at_k


@pytest.mark.parametrize("name", ["int8", "fp8", "nvfp4"])
def test_an_exported_policy_is_evaluated_with_the_codes_that_it_holds(model, tokenizer, tmp_path, monkeypatch, name):
    fmt = taken(name)
    save_policy(model, tokenizer, tmp_path / "policy")
    save_quantized(model, tokenizer, tmp_path / "codes", fmt, CONFIG.quantization.keep)
    quantized_now = report_of(tmp_path / "policy", name)
    monkeypatch.setattr("qurl_ray.weights.stream.quantize", lambda *_: pytest.fail("quantized a second time"))
    assert figures(report_of(tmp_path / "codes")) == figures(quantized_now)
    assert figures(report_of(tmp_path / "codes", name)) == figures(quantized_now)


def test_codes_beyond_what_the_kernel_takes_are_emulated(model, tokenizer, tmp_path, monkeypatch):
    save_quantized(model, tokenizer, tmp_path / "codes", get_format("int8"), CONFIG.quantization.keep)
    monkeypatch.setattr("qurl_ray.engines.torch.engine.weight_max_code", lambda *_: 63)
    assert report_of(tmp_path / "codes").kernels == ["emulation of int8"]


@pytest.mark.parametrize("other", ["none", "fp8", "int4"])
def test_codes_cannot_be_evaluated_in_another_format(model, tokenizer, tmp_path, other):
    save_quantized(model, tokenizer, tmp_path / "codes", get_format("int8"), CONFIG.quantization.keep)
    with pytest.raises(ConfigError, match=f"codes holds int8 codes: it cannot be used in {other}"):
        report_of(tmp_path / "codes", other)


def test_answers_end_at_every_token_that_the_files_of_a_policy_list(model, tokenizer, tmp_path, monkeypatch):
    save_policy(model, tokenizer, tmp_path / "policy")
    (tmp_path / "policy" / "generation_config.json").write_text('{"eos_token_id": [1, 5, 7]}')
    generate, asked = TorchEngine.generate, []

    def generating(engine, requests, **more):
        asked.extend(requests)
        return generate(engine, requests, **more)

    monkeypatch.setattr(TorchEngine, "generate", generating)
    report_of(tmp_path / "policy")
    assert {request.sampling.stop_ids for request in asked} == {(1, 5, 7)}


def test_a_chat_without_a_chat_template_is_refused(model, tokenizer, tmp_path):
    save_policy(model, tokenizer, tmp_path / "policy")
    chat = CONFIG.model_copy(update={"task": CONFIG.task.model_copy(update={"chat": True})})
    with pytest.raises(DataError, match=r"task\.chat=true: the tokenizer has no chat template"):
        evaluate(chat, tmp_path / "policy")


def test_a_policy_is_evaluated_in_full_precision_unless_told_otherwise(model, tokenizer, tmp_path):
    save_policy(model, tokenizer, tmp_path / "policy")
    report = report_of(tmp_path / "policy")
    assert (report.quantization, report.kernels) == ("none", [])


def test_answers_of_several_turns_are_judged_as_a_run_judges_them(model, tokenizer, tmp_path):
    save_policy(model, tokenizer, tmp_path / "policy")
    turns = {"max_turns": 3, "turn_tokens": 2, "cut_turns": "close"}
    bad = "tests.environments.bad_environments"
    paid = CONFIG.model_copy(update={"environment": EnvironmentConfig(type=f"{bad}:Pays", **turns)})
    paid = paid.model_copy(update={"rollout": RolloutConfig(max_new_tokens=6)})
    report = evaluate(paid, tmp_path / "policy", samples=2)
    assert (report.reward.value, report.avg_reward_at_k.value, report.failed_rewards) == (1.5, 1.5, 0)
    failing = paid.model_copy(update={"environment": EnvironmentConfig(type=f"{bad}:Nowhere", **turns)})
    with pytest.raises(EnvironmentFailed, match="has no Nowhere"):
        evaluate(failing, tmp_path / "policy")


def test_a_policy_is_compared_with_another_one(model, tokenizer, tmp_path):
    save_policy(model, tokenizer, tmp_path / "policy")
    save_quantized(model, tokenizer, tmp_path / "codes", taken("int8"), CONFIG.quantization.keep)
    same = evaluate(CONFIG, tmp_path / "codes", against=tmp_path / "codes").against
    assert (same.kl.value, same.difference.value, same.quantization) == (0, 0, "int8")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    save_policy(model, tokenizer, tmp_path / "other")
    report = evaluate(CONFIG, tmp_path / "policy", against=tmp_path / "other")
    other = evaluate(CONFIG, tmp_path / "other")
    assert report.against.reward == other.reward
    assert report.against.difference.value == pytest.approx(report.reward.value - other.reward.value)
    # Independent: what both models of transformers give to the answers that the first one draws.
    drawn = requests_of_evaluation(tokenizer)
    policies = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("policy", "other")]
    held, sums, tokens = policy_in(tmp_path / "policy"), 0.0, 0
    engine, _ = held.into(lambda kernel: TorchEngine(held.spec, slots=8, kernel=kernel), "none", CONFIG.quantization)
    for request, answer in zip(drawn, engine.generate(drawn, version=1), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]])
        own, others = (p(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0] for p in policies)
        ratio = (own - others)[len(request.prompt_ids) - 1 :].double()
        sums += (torch.exp(-ratio) - 1 + ratio).sum().item()
        tokens += len(answer.token_ids)
    assert report.against.kl.value == pytest.approx(sums / tokens, rel=0.01)
    assert report.against.kl.low < report.against.kl.value < report.against.kl.high


def requests_of_evaluation(tokenizer):
    """One request to each held-out problem, as an evaluation draws them at temperature 1."""
    task = load_task(CONFIG.task, eval_problems=CONFIG.evaluation.problems)
    encode = partial(encode_prompt, tokenizer=tokenizer, task=CONFIG.task)
    sampling = SamplingParams(max_new_tokens=4, stop_ids=(tokenizer.eos_token_id,))
    return make_requests(task.held_out, encode, samples=1, sampling=sampling, seed=0, salt="evaluation")


def test_a_policy_with_other_tokens_is_no_match(model, tokenizer, tmp_path):
    save_policy(model, tokenizer, tmp_path / "policy")
    save_policy(model, tokenizer, tmp_path / "other")
    vocabulary = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    tokens = vocabulary["model"]["vocab"]
    first, second, *_ = tokens
    tokens[first], tokens[second] = tokens[second], tokens[first]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ConfigError, match="has another tokenizer"):
        evaluate(CONFIG, tmp_path / "policy", against=tmp_path / "other")


# --- answers that a fake engine gives -----------------------------------------------------------------------------


class Engine:
    """Answers a request for the sum of two numbers as `write` does, from the right answer, in the tiny policy's tokens,
    and keeps the requests."""

    def __init__(self, tokenizer, write) -> None:
        self._tokenizer, self._write = tokenizer, write
        self.requests = []

    def kernels(self) -> list[str]:
        return []

    def generate(self, requests, *, version):
        self.requests += requests
        return [self._completion(request) for request in requests]

    def _completion(self, request) -> Completion:
        left, right = self._tokenizer.decode(request.prompt_ids).removesuffix("=").split("+")
        text = self._write(str(int(left) + int(right)))
        ids = np.array(self._tokenizer(text)["input_ids"], dtype=np.int32)
        return Completion(uid=request.uid, token_ids=ids, logprobs=-ids, versions=ids, finish="stop")


@pytest.fixture
def report_of_answers(tiny_spec, tokenizer, monkeypatch):
    """(report, engine) of an evaluation whose answers are written by a function."""

    def evaluated(write, **settings) -> tuple[Report, Engine]:
        engine = Engine(tokenizer, write)
        monkeypatch.setattr("qurl_ray.weights.local.FolderPolicy.into", lambda *_: (engine, None))
        config = RunConfig.model_validate(CONFIG.model_dump() | settings)
        return evaluate(config, Path(tiny_spec.source), samples=4), engine

    return evaluated


def test_every_sample_of_every_problem_has_a_random_stream_of_its_own(report_of_answers):
    _, engine = report_of_answers(lambda right: f"{right}<eos>", evaluation={"problems": 200})
    drawn = [request for request in engine.requests if request.sampling.temperature > 0]
    assert len(drawn) == 200 * 4
    assert len({request.seed for request in drawn}) == 200 * 4
    assert len({request.uid for request in drawn}) == 200 * 4


@pytest.mark.parametrize(
    ("write", "share"),
    [
        (lambda right: f"{right}<eos>", 1.0),
        (lambda right: f"{right[:1]}<pad>{right[1:]}<eos>", 0.0),
        (lambda right: right, 0.0),
    ],
    ids=["right", "a special token inside", "no end"],
)
def test_an_answer_is_right_as_a_whole(report_of_answers, write, share):
    report, _ = report_of_answers(write)
    found = (report.accuracy.value, report.avg_at_k.value, report.pass_at_k.value, report.failed_rewards)
    assert found == (share, share, share, 0)


def test_a_graded_reward_is_told_as_its_mean_and_the_share_solved_beside_it(report_of_answers):
    report, _ = report_of_answers(lambda right: f"{right}<eos>", task={"reward": "tests.training.rewards:constant"})
    assert (report.reward.value, report.accuracy.value) == (0.5, 0.0)
    assert (report.avg_reward_at_k.value, report.avg_at_k.value, report.pass_at_k.value) == (0.5, 0.0, 0.0)
    report, _ = report_of_answers(lambda right: f"{right}<eos>")
    assert report.reward == report.accuracy
    assert report.avg_reward_at_k == report.avg_at_k
