"""Adapters and their files: stock peft reads what is written, is read itself, and computes the same; bad input has
names."""

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qurl_ray.errors import ConfigError
from qurl_ray.numerics.products import AdapterFactor
from qurl_ray.policy.adapters import (
    CodedBase,
    SavedAdapter,
    add_adapters,
    load_adapter,
    merged,
    read_adapter,
    save_adapter,
    target_modules,
)
from qurl_ray.policy.load import load_model
from qurl_ray.quant.equalize import Factors
from qurl_ray.quant.units import units
from qurl_ray.types import Adapters

LORA = Adapters(rank=4, alpha=6.0, targets=("q_proj", "down_proj"))
IDS = torch.tensor([[1, 5, 3, 8, 2, 9], [4, 4, 7, 1, 0, 2]])


def scattered(model, lora: Adapters = LORA) -> dict[str, torch.Tensor]:
    """Attach adapters with random values of both matrices. Returns them by name."""
    names = add_adapters(model, lora)
    random = torch.Generator().manual_seed(3)
    values = {}
    for name in names:
        for factor in ("lora_A", "lora_B"):
            weight = model.get_submodule(f"{name}.{factor}").weight
            weight.data.copy_(torch.randn(weight.shape, generator=random) * 0.05)
            values[f"{name}.{factor}.weight"] = weight.detach()
    return values


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize(
    "lora", [LORA, replace(LORA, targets=("all_linear",)), replace(LORA, targets=("layers.1.mlp.up_proj",))]
)
def test_stock_peft_loads_the_folder_and_gives_the_same_logits(tiny_spec, tmp_path, lora):
    model = load_model(tiny_spec)
    plain = logits(model)
    values = scattered(model, lora)
    save_adapter(
        tmp_path / "adapter",
        SavedAdapter(adapters=lora, base=tiny_spec.source, parameters=values),
        target_modules(load_model(tiny_spec), lora),
    )
    base = AutoModelForCausalLM.from_pretrained(tiny_spec.source, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    trained = {name for name in loaded.state_dict() if "lora_" in name}
    assert len(trained) == len(values)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)
    assert (logits(model) - plain).abs().max() > 1e-3


def test_an_adapter_that_peft_wrote_is_read(tiny_spec, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(tiny_spec.source, dtype=torch.float32)
    settings = peft.LoraConfig(r=4, lora_alpha=6.0, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, settings).eval()
    torch.manual_seed(0)
    for name, value in theirs.named_parameters():
        if "lora_" in name:
            value.data.normal_(std=0.05)
    theirs.save_pretrained(tmp_path)
    saved = read_adapter(tmp_path)
    assert (saved.adapters.rank, saved.adapters.scaling, saved.base) == (4, 1.5, tiny_spec.source)
    model = load_model(tiny_spec)
    add_adapters(model, saved.adapters)
    load_adapter(model, saved, tmp_path)
    torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-5, atol=1e-5)


def test_the_first_values_are_those_of_peft_and_change_nothing(tiny_spec):
    model = load_model(tiny_spec)
    plain = logits(model)
    names = add_adapters(model, LORA, seed=7)
    assert torch.equal(logits(model), plain)
    theirs = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_spec.source, dtype=torch.float32),
        peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]),
    )
    for name in names:
        own, other = (m.get_submodule(f"{p}{name}.lora_A") for m, p in ((model, ""), (theirs, "base_model.model.")))
        weight = getattr(other, "default", other).weight
        assert own.weight.abs().max() <= weight.shape[1] ** -0.5
        assert own.weight.std().item() == pytest.approx(weight.std().item(), rel=0.1)
    again, other = load_model(tiny_spec), load_model(tiny_spec)
    add_adapters(again, LORA, seed=7)
    add_adapters(other, LORA, seed=8)
    first, same, different = (m.get_submodule(f"{names[0]}.lora_A").weight for m in (model, again, other))
    assert torch.equal(first, same)
    assert not torch.equal(first, different)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        f"{name}.{factor}.weight" for name in names for factor in ("lora_A", "lora_B")
    }


@given(st.integers(1, 6), st.floats(0.1, 50), st.integers(0, 10**6))
def test_a_merged_weight_is_the_sum(rank, alpha, seed):
    """Against float64: base and adapter side by side, on random inputs."""
    random = torch.Generator().manual_seed(seed)
    W, A, B, x = (
        torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((8, 6), (rank, 6), (8, rank), (5, 6))
    )
    parameters = [("a.weight", W), ("a.bias", torch.ones(8)), ("b.weight", W)]
    found = dict(merged(parameters, {"a.lora_A.weight": A, "a.lora_B.weight": B}, alpha / rank))
    expected = x @ W.t() + (x @ A.t()) @ B.t() * (alpha / rank)
    assert (x @ found["a.weight"].t() - expected).abs().max() <= 1e-10 * max(1.0, expected.abs().max().item())
    assert torch.equal(found["b.weight"], W)
    assert found["a.bias"] is parameters[1][1]


def test_the_record_of_codes_is_kept(tmp_path):
    scales = torch.tensor([0.5, 2.0])
    coded = CodedBase(
        format="int8",
        weight_max_code=63,
        names=("a.weight",),
        fingerprint="0" * 16,
        factors={"a": Factors(reads=scales), "b": Factors(reads=scales, writes=scales)},  # one tensor of several
    )
    saved = SavedAdapter(adapters=LORA, base="somewhere", parameters={"a.lora_A.weight": torch.ones(4, 2)}, coded=coded)
    save_adapter(tmp_path / "a", saved, ["a"])
    found = read_adapter(tmp_path / "a").coded
    assert found is not None
    assert (found.format, found.weight_max_code, tuple(found.names), found.fingerprint) == (
        "int8",
        63,
        ("a.weight",),
        "0" * 16,
    )
    assert torch.equal(found.factors["b"].writes, scales)
    assert found.factors["a"].writes is None


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"targets": ("q_prj",)}, r"no linear 'q_prj' outside its head; did you mean 'q_proj'\?"),
        ({"targets": ("q_proj", "lm_head")}, "no linear 'lm_head' outside its head"),
        ({"rank": 4000}, "learner.lora.rank=4000 is more than the rank of"),
    ],
)
def test_targets_that_cannot_be_are_refused(tiny_spec, lora, message):
    with pytest.raises(ConfigError, match=message):
        add_adapters(load_model(tiny_spec), replace(LORA, **lora))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "only LORA is known"),
        ({"use_dora": True}, "use_dora=True, which is not known"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"bias": "all"}, "bias='all'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern="),
        ({"target_modules": ".*proj"}, "list the names of the linears"),
        ({"r": 8}, "another shape, or for another model"),
        ({"target_modules": ["q_proj"]}, "another shape, or for another model"),
        (None, "holds no LoRA adapter"),
    ],
)
def test_other_adapters_are_refused_by_name(tiny_spec, tmp_path, change, message):
    model = load_model(tiny_spec)
    values = scattered(model)
    folder = tmp_path / "adapter"
    saved = SavedAdapter(adapters=LORA, base=tiny_spec.source, parameters=values)
    save_adapter(folder, saved, ["layers.0.q_proj", "layers.0.down_proj"])
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | change) if change else "{}")

    def read() -> None:
        other, found = load_model(tiny_spec), read_adapter(folder)
        add_adapters(other, found.adapters)
        load_adapter(other, found, folder)

    with pytest.raises(ConfigError, match=message):
        read()


def test_tensors_of_other_names_are_refused(tiny_spec, tmp_path):
    saved = SavedAdapter(adapters=LORA, base=tiny_spec.source, parameters=scattered(load_model(tiny_spec)))
    save_adapter(tmp_path, saved, ["layers.0.q_proj", "layers.0.down_proj"])
    file = tmp_path / "adapter_model.safetensors"
    save_file({name.removeprefix("base_model."): value for name, value in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match=r"has a tensor model\..*, expected names from base_model\.model\. on"):
        read_adapter(tmp_path)


def test_a_damaged_file_is_an_error_that_names_the_folder(tmp_path):
    Path(tmp_path, "adapter_config.json").write_text('{"r": 4, "lora_alpha": 1, "target_modules": ["q_proj"]}')
    Path(tmp_path, "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=f"{tmp_path} holds no LoRA adapter of PEFT: SafetensorError"):
        read_adapter(tmp_path)


def test_adapters_are_no_linears_to_quantize(tiny_spec):
    model = load_model(tiny_spec)
    before = set(units(model))
    add_adapters(model, LORA)
    assert set(units(model)) == before
    assert any(isinstance(module, AdapterFactor) for module in model.modules())
