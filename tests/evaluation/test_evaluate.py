"""Evaluating a saved policy, quantized here or before."""

import pytest
import torch

from qurl_ray.config import RunConfig
from qurl_ray.errors import ConfigError
from qurl_ray.evaluation.evaluate import Report, evaluate
from qurl_ray.policy.export import save_quantized
from qurl_ray.policy.save import save_policy
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.linear import weight_max_code

CONFIG = RunConfig.model_validate({"rollout": {"max_new_tokens": 4}, "evaluation": {"problems": 70}})
CPU = torch.device("cpu")


def report_of(policy, quantization: str | None = None) -> Report:
    return evaluate(
        CONFIG, policy, quantization=quantization, samples=2, temperature=1.0, progress=lambda done, total: None
    )


def figures(report: Report) -> tuple:
    return report.quantization, report.kernels, report.accuracy, report.avg_at_k, report.pass_at_k


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_an_exported_policy_is_evaluated_with_the_codes_that_it_holds(model, tokenizer, tmp_path, monkeypatch, name):
    fmt = get_format(name, weight_max_code(get_format(name), CPU))
    save_policy(model, tokenizer, tmp_path / "policy")
    save_quantized(model, tokenizer, tmp_path / "codes", fmt, CONFIG.quantization.keep)
    quantized_now = report_of(tmp_path / "policy", name)
    monkeypatch.setattr("qurl_ray.sync.publish.quantize", lambda *_: pytest.fail("quantized a second time"))
    assert figures(report_of(tmp_path / "codes")) == figures(quantized_now)
    assert figures(report_of(tmp_path / "codes", name)) == figures(quantized_now)


def test_codes_beyond_what_the_kernel_takes_are_emulated(model, tokenizer, tmp_path, monkeypatch):
    save_quantized(model, tokenizer, tmp_path / "codes", get_format("int8"), CONFIG.quantization.keep)
    monkeypatch.setattr("qurl_ray.rollout.torch_engine.weight_max_code", lambda *_: 63)
    assert report_of(tmp_path / "codes").kernels == ["emulation of int8"]


@pytest.mark.parametrize("other", ["none", "fp8", "int4"])
def test_codes_cannot_be_evaluated_in_another_format(model, tokenizer, tmp_path, other):
    save_quantized(model, tokenizer, tmp_path / "codes", get_format("int8"), CONFIG.quantization.keep)
    with pytest.raises(ConfigError, match=f"codes holds int8 codes: it cannot be evaluated in {other}"):
        report_of(tmp_path / "codes", other)


def test_a_policy_is_evaluated_in_full_precision_unless_told_otherwise(model, tokenizer, tmp_path):
    save_policy(model, tokenizer, tmp_path / "policy")
    report = report_of(tmp_path / "policy")
    assert (report.quantization, report.kernels) == ("none", [])
