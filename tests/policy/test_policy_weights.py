"""Folders that do not hold the weights of their model: found by the headers, before a weight is read."""

import json
import re
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Qwen2Config

from qurl_ray.errors import ConfigError
from qurl_ray.policy.load import load_model, outline
from qurl_ray.policy.save import save_policy
from qurl_ray.policy.tiny import make_tokenizer
from qurl_ray.types import PolicySpec

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = {"vocab_size": 18, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 64}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(folder, *, tied=False, layers=4, config=None, **options):
    """A model of random weights, and its tokenizer; without tokens of its own it would not be read."""
    torch.manual_seed(0)
    config = config or Qwen2Config(**SHAPE, **IDS, num_hidden_layers=layers, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    save_policy(model, make_tokenizer(), folder)
    if options:
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, **options)
    return folder


def change(folder, change):
    """Replace the tensors of a folder by what `change` makes of them."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def without(*parts):
    return lambda tensors: {name: t for name, t in tensors.items() if not any(part in name for part in parts)}


def of_shape(name, *shape):
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


def cast(dtype):
    return lambda tensors: {name: t.to(dtype) if "up_proj" in name else t for name, t in tensors.items()}


MIDDLE = r"12 missing \(model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, .* and 9 more\)"
DAMAGE = {
    "two layers": (False, without("layers.2.", "layers.3."), r"24 missing .* and 21 more\)"),
    "one layer": (True, without("layers.2."), MIDDLE),
    "one bias": (False, without("layers.0.self_attn.q_proj.bias"), r"1 missing \(model.layers.0.self_attn.q_proj.bias"),
    "the head": (False, without(HEAD), rf"1 missing \({HEAD}\)"),
    "the embedding": (False, without(EMBEDDING), rf"1 missing \({EMBEDDING}\)"),
    "both, which are tied": (True, without(EMBEDDING), rf"2 missing \({HEAD}, {EMBEDDING}\)"),
    "all": (False, lambda tensors: {"other": torch.zeros(3)}, "num_hidden_layers is 4, and the files hold 1 tensors"),
    "another tensor": (False, of_shape("score.weight", 2, 64), r"1 unexpected \(score.weight\)"),
    "another layer": (False, of_shape("model.layers.4.mlp.up_proj.weight", 96, 64), "1 unexpected"),
    "another vocabulary": (
        False,
        lambda tensors: of_shape(HEAD, 20, 64)(of_shape(EMBEDDING, 20, 64)(tensors)),
        rf"2 of another shape \({HEAD} \[20, 64\], expected \[18, 64\], {EMBEDDING} \[20, 64\], expected",
    ),
    "transposed": (
        False,
        of_shape("model.layers.1.mlp.up_proj.weight", 64, 96),
        r"up_proj.weight \[64, 96\], expected",
    ),
    "int8": (
        False,
        cast(torch.int8),
        r"types that cannot be trained: model.layers.0.mlp.up_proj.weight I8, .*, .* and 1",
    ),
    "fp8": (True, cast(torch.float8_e4m3fn), r"cannot be trained: model.layers.0.mlp.up_proj.weight F8_E4M3"),
    "another head": (True, of_shape(HEAD, 18, 64), rf"a {HEAD} that differs from {EMBEDDING}: set tie_word_embeddings"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_folder_with_other_tensors_than_its_models_is_an_error_that_names_them(tmp_path, what):
    tied, damage, message = DAMAGE[what]
    change(save(tmp_path / "model", tied=tied), damage)
    for use in (outline, load_model):
        with pytest.raises(ConfigError, match=message) as error:
            use(PolicySpec(source=str(tmp_path / "model")))
        assert str(tmp_path / "model") in str(error.value)


def weight(name):
    return lambda tensors: tensors[name].clone()


HARMLESS = {
    "nothing": (False, lambda tensors: tensors),
    "old buffers": (
        False,
        lambda tensors: tensors | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(4)},
    ),
    "no prefix": (True, lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items()}),
    "a tied head besides": (True, lambda tensors: tensors | {HEAD: tensors[EMBEDDING].clone()}),
    "a tied head only": (True, lambda tensors: without(EMBEDDING)(tensors) | {HEAD: tensors[EMBEDDING]}),
    "half precision": (False, lambda tensors: {name: t.bfloat16() for name, t in tensors.items()}),
}


@pytest.mark.parametrize("what", HARMLESS)
def test_what_transformers_loads_whole_is_no_error(tmp_path, what):
    tied, harmless = HARMLESS[what]
    folder = save(tmp_path / "model", tied=tied)
    before = load_file(folder / "model.safetensors")
    change(folder, harmless)
    spec = PolicySpec(source=str(folder))
    assert outline(spec).context == 64
    loaded = dict(load_model(spec).named_parameters())
    for name, tensor in before.items():
        torch.testing.assert_close(loaded[name].detach(), tensor, rtol=1e-2, atol=1e-3)


def test_buffers_that_transformers_ignores_may_be_of_any_type(tmp_path):
    config = GPTNeoXConfig(
        vocab_size=18, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=96, eos_token_id=1
    )
    config.update({"bos_token_id": 1, "classifier_dropout": 0.0})
    folder = save(tmp_path / "model", config=config)
    change(folder, lambda t: t | {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool)})
    assert load_model(PolicySpec(source=str(folder))).config.num_hidden_layers == 1


def test_shards_are_read_as_one_and_a_missing_one_is_named(tmp_path):
    folder = save(tmp_path / "model", max_shard_size="100KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    spec = PolicySpec(source=str(folder))
    outline(spec)
    shards[1].unlink()
    lacks = rf"lacks 1 of the {len(shards)} files that model.safetensors.index.json names: {shards[1].name}"
    with pytest.raises(ConfigError, match=lacks):
        outline(spec)
    shards[2].unlink()
    with pytest.raises(ConfigError, match=f"lacks 2 of .*: {shards[1].name}, {shards[2].name}"):
        load_model(spec)


@pytest.mark.parametrize("index", [b"{", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"a": 3}}', b"\xff"])
def test_an_index_that_is_none_is_named(tmp_path, index):
    folder = save(tmp_path / "model", max_shard_size="100KB")
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json cannot be read"):
        outline(PolicySpec(source=str(folder)))


def swap(old, new):
    return lambda data: data.replace(old, new, 1)


GARBAGE = {
    "empty": lambda data: b"",
    "cut in its header": lambda data: data[:200],
    "cut in its data": lambda data: data[:-1000],
    "longer": lambda data: data + bytes(1000),
    "text": lambda data: b"<html>Not found</html>",
    "a pointer of Git LFS": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "a header that is longer than the file": lambda data: struct.pack("<Q", 1 << 40) + data[8:],
    "no JSON": swap(b'{"', b'["'),
    "another shape than size": swap(b"[18,64]", b"[19,64]"),
    "an unknown type": swap(b'"F32"', b'"F33"'),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_a_damaged_file_is_named(tmp_path, what):
    folder = save(tmp_path / "model")
    file = folder / "model.safetensors"
    before = file.read_bytes()
    file.write_bytes(GARBAGE[what](before))
    assert file.read_bytes() != before
    for use in (outline, load_model):
        with pytest.raises(ConfigError, match=r"model\.safetensors is damaged, or no safetensors file: .*get it again"):
            use(PolicySpec(source=str(folder)))


def test_pickles_are_refused_and_never_opened(tmp_path):
    folder = save(tmp_path / "model")
    spec = PolicySpec(source=str(folder))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for use in (outline, load_model):
        with pytest.raises(ConfigError, match=r"as pickles \(pytorch_model.bin\).*: convert them to safetensors"):
            use(spec)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(
        ConfigError, match=r"holds no weights: neither model\.safetensors nor model\.safetensors\.index"
    ):
        outline(spec)


def test_only_headers_are_read(tmp_path):
    """16 GB that are not there: a hole in a file. A check that read them would take a minute and all memory."""
    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**wide, **IDS | {"vocab_size": 128256}, num_hidden_layers=32, tie_word_embeddings=False)
    config.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    assert end > 16e9
    found = outline(PolicySpec(source=str(tmp_path), max_length=32))
    assert found.context == 32
    assert {parameter.device.type for parameter in found.model.parameters()} == {"meta"}
    assert re.sub(r"\d+", "", str(found.model.lm_head)) == "Linear(in_features=, out_features=, bias=False)"
