"""The quantized checkpoint: our codes exactly, readable by stock transformers and stock vLLM."""

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from qurl_ray.errors import ConfigError, QuantizationError
from qurl_ray.policy.attention import NAME
from qurl_ray.policy.export import is_quantized_checkpoint, read_quantized, save_quantized
from qurl_ray.policy.load import empty_model, load_model
from qurl_ray.policy.logprobs import token_logprobs
from qurl_ray.policy.save import save_policy
from qurl_ray.quant.formats import FORMATS, get_format
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import QTensor, dequantize, quantize
from qurl_ray.quant.uaq import fold
from qurl_ray.quant.units import units
from qurl_ray.types import PolicySpec
from qurl_ray.weights.stream import Publisher
from tests.conftest import SUMS, taken

KEEP = (r"(^|\.)lm_head\.",)
EXPORTED = [get_format("int8"), get_format("int8", 63)]
EXPORTED += [get_format(name) for name in ("fp8", "fp8_block", "int4", "mxfp4", "mxfp8", "nvfp4")]
names = lambda fmt: f"{fmt.name}-{fmt.weight_max}"  # noqa: E731


def wide_model() -> LlamaForCausalLM:
    """Two blocks of 128 in each direction: compressed-tensors takes scales of a single column for those of rows."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=1, bos_token_id=None, eos_token_id=1, **sizes)
    return LlamaForCausalLM._from_config(config, attn_implementation=NAME).eval()


@pytest.fixture
def odd_model():
    """The shape of SmolLM2 (9 query heads, 3 key heads, 576 wide, tied embeddings), two layers of random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.06,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=NAME).eval()


def published(parameters, fmt, quantized):
    """(records, payloads) of a sync of these parameters."""
    buckets = list(Publisher(quantized).prepare(parameters, fmt, version=1))
    return [r for b in buckets for r in b.records], [p for b in buckets for p in b.payloads]


@pytest.mark.parametrize("fmt", EXPORTED, ids=names)
def test_the_file_holds_the_codes_that_a_sync_sends_also_under_update_aware_scaling(model, tokenizer, tmp_path, fmt):
    fold(model, 1.5)
    save_quantized(model, tokenizer, tmp_path / "policy", fmt, KEEP)
    stored = load_file(tmp_path / "policy" / "model.safetensors")
    quantized = units(model, KEEP)
    sent = {payload.name: payload.parts for payload in published(model.named_parameters(), fmt, quantized)[1]}
    packed = "_packed" * (fmt.name in ("int4", "mxfp4", "nvfp4"))
    codes = {name: f"{name}{packed}" if name in quantized else name for name in sent}
    more = {"int4": ["_shape"], "nvfp4": ["_global_scale"]}.get(fmt.name, [])
    assert set(stored) == {*codes.values(), *(name + part for name in quantized for part in ["_scale", *more])}
    for name, parts in sent.items():
        if name in quantized:
            assert stored[codes[name]].dtype == (torch.int32 if fmt.name == "int4" else fmt.dtype)
            np.testing.assert_array_equal(stored[codes[name]].view(torch.uint8).numpy(), parts[0])
            scale = stored[f"{name}_scale"]
            if fmt.name == "nvfp4":  # of another outer scale
                scale = scale.float() / stored[f"{name}_global_scale"]
                own = torch.from_numpy(parts[1]).view(torch.float8_e4m3fn).float()
                assert torch.equal(scale, own * parts[2].view(np.float32))
            else:
                np.testing.assert_array_equal(scale.numpy(), parts[1].view(scale.numpy().dtype))
        else:
            np.testing.assert_array_equal(stored[name].numpy(), parts[0].view(np.float32))


@pytest.mark.parametrize("fmt", EXPORTED, ids=names)
def test_what_is_read_is_what_was_written(model, tokenizer, tmp_path, fmt):
    for _ in range(2):  # the second time it replaces the first
        save_quantized(model, tokenizer, tmp_path / "policy", fmt, KEEP)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert is_quantized_checkpoint(tmp_path / "policy")
    assert AutoTokenizer.from_pretrained(tmp_path / "policy")("1+2=").input_ids == tokenizer("1+2=").input_ids
    found = read_quantized(tmp_path / "policy")
    assert found.fmt == fmt
    quantized = units(model, KEEP)
    sent, _ = published(model.named_parameters(), fmt, quantized)
    again, _ = published(found.parameters.items(), found.fmt, set())
    if fmt.name != "nvfp4":  # whose scales are of another outer scale
        assert {r.name: r for r in again} == {r.name: r for r in sent}  # fingerprints among the rest
    for name, parameter in model.named_parameters():
        value = found.parameters[name]
        expected = dequantize(quantize(parameter, fmt)) if name in quantized else parameter
        assert torch.equal(dequantize(value) if name in quantized else value, expected), name


@pytest.mark.parametrize("fmt", EXPORTED, ids=names)
def test_stock_transformers_loads_it_and_finds_our_weights(model, tokenizer, tmp_path, fmt):
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    save_quantized(wide_model() if fmt.rows > 1 else model, tokenizer, tmp_path / "policy", fmt, KEEP)
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path / "policy", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    loaded = dict(stock.named_parameters())
    for name, value in read_quantized(tmp_path / "policy").parameters.items():
        expected = dequantize(value) if isinstance(value, QTensor) else value
        assert torch.equal(loaded[name], expected), name


def test_linears_that_vllm_fuses_share_an_outer_scale_in_nvfp4(odd_model, tokenizer, tmp_path):
    fmt, layers = FORMATS["nvfp4"], [f"model.layers.{layer}" for layer in (0, 1)]
    together = [[f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"] for layer in layers]
    together += [[f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up")] for layer in layers]
    parameters = dict(odd_model.named_parameters())
    with torch.no_grad():
        for group, names in enumerate(together):
            for power, name in enumerate(names):
                parameters[name].mul_(2.0 ** (group - 2 * power))
    own = {name: quantize(parameters[name], fmt).more[0].max() for names in together for name in names}
    assert all(len({float(own[name]) for name in names}) == len(names) for names in together)
    save_quantized(odd_model, tokenizer, tmp_path, fmt, KEEP)
    stored, read = load_file(tmp_path / "model.safetensors"), read_quantized(tmp_path).parameters
    for names in together:
        assert {float(stored[f"{name}_global_scale"]) for name in names} == {float(1 / max(map(own.get, names)))}
        for name in names:
            assert torch.equal(dequantize(read[name]), dequantize(quantize(parameters[name], fmt))), name
    assert len({float(value) for name, value in stored.items() if name.endswith("_global_scale")}) > 2


def test_a_checkpoint_quantized_in_another_way_is_not_read(model, tokenizer, tmp_path):
    save_quantized(model, tokenizer, tmp_path, FORMATS["int8"], KEEP)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantizationError, match=r"not known here \(compressed-tensors, int-quantized\)"):
        read_quantized(tmp_path)


def test_a_damaged_checkpoint_of_codes_is_named(model, tokenizer, tmp_path):
    file = tmp_path / "out" / "model.safetensors"
    save_quantized(model, tokenizer, tmp_path / "out", get_format("int8"), KEEP)
    whole, tensors = file.read_bytes(), load_file(file)
    file.write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        read_quantized(tmp_path / "out")
    save_file({name: tensor for name, tensor in tensors.items() if not name.endswith("_scale")}, file)
    with pytest.raises(QuantizationError, match="out lacks codes or scales of its linears"):
        read_quantized(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="out' cannot be loaded"):
        is_quantized_checkpoint(tmp_path / "out")


def test_a_quantized_checkpoint_is_no_start_for_training(model, tokenizer, tmp_path):
    save_quantized(model, tokenizer, tmp_path / "codes", FORMATS["int8"], KEEP)
    save_policy(model, tokenizer, tmp_path / "plain")
    assert not is_quantized_checkpoint(tmp_path / "plain")
    for use in (load_model, empty_model):
        with pytest.raises(ConfigError, match="quantized already, which cannot be trained"):
            use(PolicySpec(source=str(tmp_path / "codes")))
    assert empty_model(PolicySpec(source=str(tmp_path / "codes"), quantized=True)).dtype == torch.float32


# --- vLLM --------------------------------------------------------------------------------------------------------


def vllm_greedy(folders: list[Path], prompts: list[list[int]]) -> list[list[dict]]:
    """By folder and prompt, {"ids", "logprobs"} of 12 tokens."""
    child = Path(__file__).with_name("vllm_generate.py")
    done = subprocess.run(
        [sys.executable, child, *folders], input=json.dumps(prompts), capture_output=True, text=True, timeout=240
    )
    found = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stderr[-3000:]
    return json.loads(found[0])


@torch.no_grad()
def teacher_forced(model, prompts: list[list[int]], answers: list[list[int]]) -> tuple[np.ndarray, float]:
    """(log-probs of the answers, share of answer tokens that are the likeliest under the model)."""
    logprobs, best = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer])
        mask = (torch.arange(ids.shape[1]) >= len(prompt))[None]
        logprobs.append(token_logprobs(model, ids, mask, 1.0)[mask].numpy())
        positions = torch.arange(ids.shape[1])[None]
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, len(prompt) - 1 : -1]
        best += (logits.argmax(dim=-1) == torch.tensor(answer)).tolist()
    return np.stack(logprobs), float(np.mean(best))


def with_stored_codes(model, folder: Path):
    """The model computing through the checkpoint's codes, by the float32 definition."""
    for name, value in read_quantized(folder).parameters.items():
        if isinstance(value, QTensor):
            path = name.removesuffix(".weight")
            model.set_submodule(path, QuantizedLinear(value, model.get_submodule(path).bias, emulate=True))
    return model.requires_grad_(False)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("shape", ["model", "odd_model"])
def test_stock_vllm_serves_it_with_our_log_probs(shape, tokenizer, tmp_path, request):
    model = request.getfixturevalue(shape)
    prompts = [tokenizer(problem.prompt).input_ids for problem in SUMS[:40:5]]
    folders = [tmp_path / "int8", tmp_path / "fp8"]
    for folder in folders:
        fmt = taken(folder.name)
        save_quantized(model, tokenizer, folder, fmt, KEEP)
    for folder, served in zip(folders, vllm_greedy(folders, prompts), strict=True):
        answers, found = [s["ids"] for s in served], np.array([s["logprobs"] for s in served])
        full, _ = teacher_forced(model, prompts, answers)
        ours, agreed = teacher_forced(with_stored_codes(copy.deepcopy(model), folder), prompts, answers)
        # A rounding error that flips an activation's code is not small, so there is a distance: far from that of the
        # full-precision model, which would be the distance if the codes were not used.
        assert np.abs(found - ours).mean() < 0.15 * np.abs(found - full).mean(), folder.name
        assert agreed > 0.95, folder.name
