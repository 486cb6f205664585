"""Mixtures of experts: the network of stock transformers, rows that depend on themselves alone, names of the hub."""

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError
from qurl_ray.policy.experts import _KINDS, Clamp, MixtureMlp, Router, choose, stored_name
from qurl_ray.policy.export import read_quantized, save_quantized
from qurl_ray.policy.load import StoredWeights, check_policy, files_digest, load_model, load_tokenizer, unloaded_model
from qurl_ray.policy.save import save_policy
from qurl_ray.policy.stacked import place_of
from qurl_ray.policy.tiny import tiny_outline
from qurl_ray.quant.equalize import equalized, factors_of
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.uaq import fold
from qurl_ray.quant.units import find_sites, units
from qurl_ray.tables import ENGINES
from qurl_ray.training.driver.prepare import check_model
from qurl_ray.types import PolicySpec
from tests.policy.gpt_oss import written

SIZES = {"vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "max_position_embeddings": 64, "num_experts_per_tok": 2}
SIZES |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=32, moe_intermediate_size=48, num_experts=6, norm_topk_prob=True),
    "qwen3_moe, not normalized": Qwen3MoeConfig(
        **SIZES, head_dim=32, moe_intermediate_size=48, num_experts=6, norm_topk_prob=False
    ),
    "qwen3_moe, every second layer": Qwen3MoeConfig(
        **SIZES, head_dim=32, moe_intermediate_size=48, intermediate_size=80, num_experts=6, decoder_sparse_step=2
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, moe_intermediate_size=48, shared_expert_intermediate_size=80, intermediate_size=96, num_experts=6
    ),
    "olmoe": OlmoeConfig(**SIZES, intermediate_size=48, num_experts=6),
    "mixtral": MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=6, sliding_window=None),
    "gpt_oss": GptOssConfig(**SIZES, head_dim=32, intermediate_size=96, num_local_experts=6, sliding_window=5),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_spec) -> dict[str, Path]:
    """Checkpoints that stock transformers has written."""
    made = {}
    for number, (name, config) in enumerate(CONFIGS.items()):
        folder = tmp_path_factory.mktemp("mixture") / str(number)
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn(len(parameter)))
        model.save_pretrained(folder)
        load_tokenizer(tiny_spec).save_pretrained(folder)
        made[name] = folder
    return made


def logits_of(model, ids_BT: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids_BT, position_ids=torch.arange(ids_BT.shape[1])[None], use_cache=False).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_network_of_stock_transformers(folders, name):
    stock = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32, attn_implementation="eager")
    model = load_model(PolicySpec(source=str(folders[name])))
    assert any(isinstance(module, MixtureMlp) for module in model.modules())
    ids_BT = torch.randint(1, 40, (3, 17), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(logits_of(model, ids_BT), logits_of(stock.eval(), ids_BT), rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_round_trip_changes_no_byte_and_no_name(folders, tmp_path, name):
    spec = PolicySpec(source=str(folders[name]))
    save_policy(load_model(spec), load_tokenizer(spec), tmp_path / "again")
    before, after = (load_file(folder / "model.safetensors") for folder in (folders[name], tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    if name != "gpt_oss":
        assert any(".experts.5." in key for key in before), "the hub names experts one by one"
    ids_BT = torch.arange(1, 12)[None]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "again", attn_implementation="eager").eval()
    torch.testing.assert_close(logits_of(stock, ids_BT), logits_of(load_model(spec), ids_BT), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_expert_and_no_router_becomes_codes(folders, name):
    model = load_model(PolicySpec(source=str(folders[name])))
    names = units(model, [r"lm_head\."])
    sparse = sum(isinstance(module, MixtureMlp) for module in model.modules())
    assert sum(".experts." in unit for unit in names) == sparse * 6 * 3
    assert sum(".shared_expert." in unit for unit in names) == (sparse * 3 if name == "qwen2_moe" else 0)
    assert not any("shared_expert_gate" in unit for unit in names)
    assert not any(unit.endswith("mlp.gate.weight") for unit in names)
    shares = [p.numel() for unit, p in model.named_parameters() if unit in names]
    assert sum(shares) > 0.8 * sum(p.numel() for unit, p in model.named_parameters() if "layers" in unit)


@pytest.mark.equal_bits
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 33])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_a_tokens_bits_do_not_depend_on_the_others(folders, name, rows):
    model = load_model(PolicySpec(source=str(folders[name])))
    mlp = model.base_model.layers[0].mlp

    def layer(x: torch.Tensor) -> torch.Tensor:
        return MixtureMlp.forward(mlp, x)

    x_Nd = torch.randn(64, 64, generator=torch.Generator().manual_seed(rows))
    with torch.no_grad():
        whole = layer(x_Nd[None])[0]
        assert all(torch.equal(layer(part), y) for part, y in zip(x_Nd.split(rows), whole.split(rows), strict=True))
    with_gradients = layer(x_Nd[:rows])
    assert torch.equal(with_gradients.detach(), whole[:rows])


def test_equal_probabilities_go_to_the_lower_index():
    router = Router(8, 6, bias=False)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, 0.0])[:, None].expand(6, 8))
        weights_Nk, experts_Nk, _ = choose(router(torch.ones(3, 8)), 2, normalizes=True)
    assert experts_Nk.tolist() == [[1, 3]] * 3
    torch.testing.assert_close(weights_Nk, torch.full((3, 2), 0.5))


def test_gpt_oss_clamps_its_activation_and_chooses_by_logits():
    """By hand: g · sigmoid(1.702 g) · (u + 1), g = min(gate, 7), u = up between ±7; the softmax of chosen logits."""
    clamp = Clamp(alpha=1.702, limit=7.0)
    found = clamp(torch.tensor([[-9.0, 1.0, 30.0, 2.0]]), torch.tensor([[3.0, -20.0, 20.0, 0.5]]))
    expected = [g / (1 + math.exp(-1.702 * g)) * u for g, u in ((-9.0, 4.0), (1.0, -6.0), (7.0, 8.0), (2.0, 1.5))]
    torch.testing.assert_close(found, torch.tensor([expected]))
    logits = torch.tensor([[60.0, -70.0, 2.0, -69.0], [1.0, 3.0, 3.0, 3.0]])  # of all, two would have probability 0
    weights_Nk, experts_Nk, _ = choose(logits, 3, normalizes=True, of_chosen=True)
    assert experts_Nk.tolist() == [[0, 2, 3], [1, 2, 3]]
    torch.testing.assert_close(weights_Nk, logits.gather(1, experts_Nk).softmax(-1))
    weights_Nk, *_ = choose(logits, 1, normalizes=True, of_chosen=True, replayed_Nk=torch.tensor([[3], [-1]]))
    assert weights_Nk.tolist() == [[1.0], [1.0]]


def test_gpt_oss_is_stock_transformers_to_rounding_also_where_it_clamps(tiny_spec, tmp_path):
    """Log-probs and all gradients, in float32, against the eager forward of transformers in float64."""
    spec = written(tmp_path / "stock", tiny_spec, scale=0.1)
    kind = {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
    stock, model = AutoModelForCausalLM.from_pretrained(spec.source, **kind).eval(), load_model(spec)
    with torch.no_grad():
        for each in (stock, model):
            each.model.layers[2].post_attention_layernorm.weight.mul_(6)
    seen = list[torch.Tensor]()
    clamp = model.model.layers[2].mlp.experts[1].gate_proj.register_forward_hook(lambda _, __, out: seen.append(out))
    ids_BT = torch.randint(1, 17, (4, 23), generator=torch.Generator().manual_seed(1))
    logprobs = []
    for each in (stock, model):
        out = each(input_ids=ids_BT, position_ids=torch.arange(23)[None], use_cache=False).logits.log_softmax(-1)
        out[:, 5:, 3].mean().backward()
        logprobs.append(out.detach())
    clamp.remove()
    assert (torch.cat(seen) > 7).any()
    torch.testing.assert_close(logprobs[1].double(), logprobs[0], rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        place = place_of(model.config, name)
        whole = stock.get_parameter(place.key if place else stored_name(model.config, name)).grad
        expected = place.of(whole) if place else whole
        assert torch.allclose(parameter.grad.double(), expected, rtol=1e-3, atol=1e-6), name


def test_gradients_are_those_of_stock_transformers_and_idle_experts_have_zeros(folders):
    """Independent: autograd through the fused experts of transformers."""
    folder = folders["qwen3_moe"]
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = load_model(PolicySpec(source=str(folder)))
    ids_BT = torch.tensor([[3, 7, 9]])
    for each in (stock, model):
        out = each(input_ids=ids_BT, position_ids=torch.arange(3)[None], use_cache=False).logits
        out.log_softmax(-1)[0, :, 5].sum().backward()
    own = dict(model.named_parameters())
    assert all(parameter.grad is not None for parameter in own.values())
    idle = 0
    for layer in range(2):
        fused = stock.model.layers[layer].mlp.experts
        for expert in range(6):
            path = f"model.layers.{layer}.mlp.experts.{expert}"
            both = torch.cat([own[f"{path}.{part}_proj.weight"].grad for part in ("gate", "up")])
            torch.testing.assert_close(both, fused.gate_up_proj.grad[expert], rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(
                own[f"{path}.down_proj.weight"].grad, fused.down_proj.grad[expert], rtol=1e-3, atol=1e-5
            )
            idle += not both.any()
        gate = stock.model.layers[layer].mlp.gate.weight.grad
        torch.testing.assert_close(own[f"model.layers.{layer}.mlp.gate.weight"].grad, gate, rtol=1e-3, atol=1e-5)
    assert idle, "no expert was idle: the test would not see a missing gradient"


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "gpt_oss"])
def test_factors_and_uaq_go_through_the_router_too(folders, name):
    """Factors are powers of two: not a bit changes. UAQ's scale is not: the same network but for rounding."""
    spec = PolicySpec(source=str(folders[name]))
    model, other, scaled = load_model(spec), load_model(spec), load_model(spec)
    sites = find_sites(model)
    gates = ("gate", "shared_expert_gate") if name == "qwen2_moe" else ("gate",)
    exact = [tuple(f"model.layers.{n}.mlp.{gate}" for gate in gates) for n in (0, 1)]
    assert [site.exact for site in sites if site.kind == "mlp"] == exact
    random = torch.Generator().manual_seed(3)
    chosen = {site.writer: torch.randint(-3, 4, (64,), generator=random).to(torch.int8) for site in sites}
    factors = factors_of(sites, chosen)
    with torch.no_grad():
        for parameter_name, value in equalized(list(model.named_parameters()), factors):
            other.get_parameter(parameter_name).copy_(value)
    ids_BT = torch.randint(1, 40, (3, 17), generator=random)
    expected = logits_of(model, ids_BT)
    assert torch.equal(logits_of(other, ids_BT), expected)
    fold(scaled, 1.5)
    torch.testing.assert_close(logits_of(scaled, ids_BT), expected, rtol=1e-4, atol=1e-4)


def test_a_sharded_learner_reads_experts_by_name(folders):
    for name in ("qwen3_moe", "mixtral"):
        spec = PolicySpec(source=str(folders[name]))
        model, whole = unloaded_model(spec), load_model(spec)
        stored = StoredWeights(spec, model)
        for parameter_name, parameter in whole.named_parameters():
            assert torch.equal(stored.rows(parameter_name, 1, 3), parameter[1:3])


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_exported_codes_are_read_under_the_names_of_parameters(folders, tmp_path, name, tokenizer):
    model = load_model(PolicySpec(source=str(folders[name])))
    fmt = get_format("int8")
    save_quantized(model, tokenizer, tmp_path / "int8", fmt, ["lm_head", "gate\\."])
    found = read_quantized(tmp_path / "int8").parameters
    assert found.keys() == dict(model.named_parameters()).keys()
    weight = "model.layers.1.mlp.experts.4.up_proj.weight"
    assert torch.equal(found[weight].codes, quantize(model.get_parameter(weight), fmt).codes)


def damaged(folder: Path, to: Path, change) -> PolicySpec:
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return PolicySpec(source=str(to))


EXPERT = "model.layers.1.mlp.experts.4.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda tensors: tensors.pop(EXPERT), "experts"),
        (lambda tensors: tensors.update({EXPERT: torch.zeros(3, 64)}), "experts"),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(6, 96, 64)}),
            "experts",
        ),
        (lambda tensors: tensors.update({EXPERT.replace(".4.", ".6."): torch.zeros(48, 64)}), "experts"),
        (lambda tensors: tensors.pop("model.layers.0.mlp.gate.weight"), "mlp.gate"),
    ],
    ids=["missing", "misshapen", "fused and single", "one too many", "no router"],
)
def test_damaged_checkpoints_are_refused(folders, tmp_path, change, fact):
    spec = damaged(folders["qwen3_moe"], tmp_path / "damaged", change)
    with pytest.raises(ConfigError, match=fact):
        load_model(spec)


def test_a_changed_expert_is_another_model(folders, tmp_path):
    """Ranks compare their files by this digest."""
    spec = damaged(folders["qwen3_moe"], tmp_path / "other", lambda tensors: tensors[EXPERT].mul_(2))
    assert files_digest(spec) != files_digest(PolicySpec(source=str(folders["qwen3_moe"])))


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        (
            {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "num_experts": 8},
            "not known here .*; it has shared experts",
        ),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9, and there are 6 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
    ],
)
def test_mixtures_that_are_not_known_are_refused_by_name(folders, tmp_path, settings, fact):
    shutil.copytree(folders["qwen3_moe"], tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ConfigError, match=fact):
        load_model(PolicySpec(source=str(tmp_path / "other")))


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        *(
            (
                ["rollout.engine=vllm", "rollout.router_replay=rollout", *other],
                "which rollout.engine=vllm does not return",
            )
            for other in (["rollout.device=cuda", "rollout.dtype=bfloat16"], ["rollout.vllm.tensor_parallel=2"])
        ),
        (
            ["model.experts=0", "rollout.router_replay=rollout"],
            "needs a mixture of experts, and Qwen2ForCausalLM is dense",
        ),
        (["model.experts=0", "learner.backend=fsdp", "learner.expert_parallel=true"], "Qwen2ForCausalLM is dense"),
        (
            ["learner.workers=3", "learner.backend=fsdp", "learner.expert_parallel=true"],
            "4 experts cannot be divided by learner.workers=3",
        ),
    ],
)
def test_runs_that_could_not_have_experts_are_refused(settings, fact):
    config = load_config(None, ["model.experts=4", *settings])
    with pytest.raises(ConfigError, match=fact):
        check_model(config, tiny_outline(config.model).model)


@pytest.mark.parametrize(
    ("name", "engine", "fact"),
    [
        ("qwen2_moe", "vllm", "Qwen2MoeForCausalLM is a mixture of experts, which rollout.engine=vllm does not have"),
        ("gpt_oss", "vllm", "GptOssForCausalLM is a mixture of experts, which rollout.engine=vllm does not have"),
        ("olmoe", "tests.engines.test_none:none", "which rollout.engine=tests.engines.test_none:none does not have"),
        *((name, engine, None) for name in ("olmoe", "mixtral", "qwen3_moe") for engine in ("torch", "vllm")),
    ],
)
def test_an_engine_has_the_mixtures_that_its_entry_names(folders, name, engine, fact):
    spec = PolicySpec(source=str(folders[name]))
    config = load_config(None, [f"rollout.engine={engine}"])
    with pytest.raises(ConfigError, match=fact) if fact else nullcontext():
        check_model(config, check_policy(spec))


def test_the_torch_engine_has_all_mixtures():
    assert set(ENGINES.entries["torch"].experts) == {config.model_type for config in CONFIGS.values()} == set(_KINDS)


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        (["model.experts=1"], "experts=1 is a dense policy"),
        (["model.experts=4", "model.active_experts=5"], "active_experts=5 is more than experts=4"),
        (["model.experts=4", "rollout.router_replay_weights=true"], "needs router_replay=rollout or always"),
        (["model.experts=4", "learner.expert_parallel=true", "learner.backend=deepspeed"], "needs that backend"),
    ],
)
def test_tiny_mixtures_whose_numbers_contradict_each_other_are_refused(settings, fact):
    with pytest.raises(ConfigError, match=fact):
        load_config(None, settings)
