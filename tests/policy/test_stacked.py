"""Experts in one tensor for a layer, as floats and as MXFP4: read to the bit, written under the hub's names."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qurl_ray.errors import ConfigError, QuantizationError
from qurl_ray.policy.export import is_quantized_checkpoint, save_quantized
from qurl_ray.policy.load import StoredWeights, load_model, load_tokenizer, unloaded_model
from qurl_ray.policy.save import save_policy
from qurl_ray.policy.stacked import mxfp4_values
from qurl_ray.quant.formats import get_format
from qurl_ray.types import PolicySpec
from tests.policy.gpt_oss import in_mxfp4, written


@pytest.fixture(scope="module")
def spec(tmp_path_factory, tiny_spec) -> PolicySpec:
    return written(tmp_path_factory.mktemp("gpt_oss") / "stock", tiny_spec)


@pytest.fixture(scope="module")
def packed(tmp_path_factory, spec) -> tuple[PolicySpec, PolicySpec]:
    """In MXFP4, and as stock transformers dequantizes it."""
    return in_mxfp4(spec, tmp_path_factory.mktemp("mxfp4"))


def test_all_codes_and_scales_are_dequantized_as_transformers_does():
    """All 256 bytes, under all scales whose products float32 and bfloat16 hold."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 252, 16, 16)
    scales = torch.arange(252, dtype=torch.uint8).view(1, 252, 1).expand(1, 252, 16)
    for kind in (torch.float32, torch.bfloat16):
        expected = convert_moe_packed_tensors(blocks, scales, dtype=kind).float()
        found = mxfp4_values(blocks, scales).transpose(1, 2).contiguous()
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))  # zeros have signs
    assert mxfp4_values(blocks, scales)[0, 127, :8].tolist() == [0.0, 0.0, 0.5, 0.0, 1.0, 0.0, 1.5, 0.0]


def test_weights_in_mxfp4_are_those_of_stock_transformers(packed):
    own, plain = (dict(load_model(spec).named_parameters()) for spec in packed)
    assert own.keys() == plain.keys()
    assert all(torch.equal(own[name], plain[name]) for name in own)
    assert all(parameter.is_contiguous() for parameter in plain.values()), "DeepSpeed sends them as bytes"
    stock = AutoModelForCausalLM.from_pretrained(packed[1].source, dtype=torch.float32)
    experts = stock.model.layers[1].mlp.experts
    path = "model.layers.1.mlp.experts.3"
    for part, first in (("gate", 0), ("up", 1)):
        assert torch.equal(own[f"{path}.{part}_proj.weight"], experts.gate_up_proj[3, :, first::2].t())
        assert torch.equal(own[f"{path}.{part}_proj.bias"], experts.gate_up_proj_bias[3, first::2])
    assert torch.equal(own[f"{path}.down_proj.weight"], experts.down_proj[3].t())
    assert torch.equal(own[f"{path}.down_proj.bias"], experts.down_proj_bias[3])


def test_a_rank_reads_its_rows_of_an_expert_alone(spec, packed):
    for each in (spec, *packed):
        stored = StoredWeights(each, unloaded_model(each))
        for name, parameter in load_model(each).named_parameters():
            assert torch.equal(stored.rows(name, 1, 3), parameter[1:3])
            assert len(stored.rows(name, 2, 2)) == 0  # of a rank without rows


def test_a_checkpoint_in_mxfp4_is_saved_in_full_precision_under_the_names_of_the_hub(packed, tmp_path):
    before, plain = packed
    assert not is_quantized_checkpoint(Path(before.source))
    save_policy(load_model(before), load_tokenizer(before), tmp_path / "saved")
    saved, expected = (load_file(Path(folder) / "model.safetensors") for folder in (tmp_path / "saved", plain.source))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


LAYER = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda t: t.pop(f"{LAYER}.down_proj_scales"), r"1 missing \(.*1.*down_proj_scales\)"),
        (lambda t: t.pop(f"{LAYER}.gate_up_proj_bias"), r"1 missing \(.*1.*gate_up_proj_bias\)"),
        (
            lambda t: t.update({f"{LAYER}.down_proj": torch.zeros(6, 96, 64)}),
            r"1 unexpected \(.*1.*experts.down_proj\)",
        ),
        (
            lambda t: t.update({f"{LAYER}.0.up_proj.weight": torch.zeros(96, 64)}),
            r"1 unexpected \(.*1.*experts.0.up_proj.weight\)",
        ),
        (
            lambda t: t.update({f"{LAYER}.down_proj_scales": t[f"{LAYER}.down_proj_scales"][:, :-1].contiguous()}),
            r"down_proj_scales \[6, 63, 3\], expected \[6, 64, 3\]",
        ),
        (
            lambda t: t.update({f"{LAYER}.down_proj_blocks": t[f"{LAYER}.down_proj_blocks"].float()}),
            "types that cannot be trained: .*down_proj_blocks F32",
        ),
        (lambda t: t[f"{LAYER}.down_proj_scales"][4].fill_(255), r"down_proj_scales holds no numbers for expert 4"),
    ],
    ids=["no scales", "no bias", "both kinds", "single", "misshapen", "floats", "nan"],
)
def test_damaged_and_mixed_checkpoints_are_refused(packed, tmp_path, change, fact):
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in Path(packed[0].source).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=fact) as caught:
        load_model(PolicySpec(source=str(folder)))
    assert "\n" not in str(caught.value)


def test_mxfp4_of_another_architecture_is_refused(tiny_spec, tmp_path):
    for file in Path(tiny_spec.source).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ConfigError, match="is quantized already, which cannot be trained"):
        load_model(PolicySpec(source=str(tmp_path)))


def test_no_codes_are_exported_that_nothing_could_read(spec, tmp_path):
    with pytest.raises(
        QuantizationError, match=r"GptOssForCausalLM cannot be exported in int8: .*export.quantized=none"
    ):
        save_quantized(load_model(spec), load_tokenizer(spec), tmp_path / "codes", get_format("int8"), [r"lm_head\."])
