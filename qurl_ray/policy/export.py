"""Write the quantized policy for stock vLLM and transformers, and read it back with exactly the codes that it holds.

The format is compressed-tensors (https://github.com/vllm-project/compressed-tensors): config.json describes how the
linears are quantized, the safetensors hold the codes under "<linear>.weight" and their scales under
"<linear>.weight_scale". All other tensors keep their precision. Float32 scales are as the engines use them.

| format | its name there | codes | scales |
|---|---|---|---|
| int8, fp8 | int-quantized, float-quantized | weight | float32 [N, 1] |
| fp8_block | float-quantized | weight | float32 [N / 128, K / 128] |
| int4 | pack-quantized | weight_packed, eight in an int32 | float32 [N, K / 128] |
| mxfp4 | mxfp4-pack-quantized | weight_packed, two in a byte | exponents, uint8 [N, K / 32] |
| mxfp8 | mxfp8-quantized | weight | exponents, uint8 [N, K / 32] |
| nvfp4 | nvfp4-pack-quantized | weight_packed, two in a byte | E4M3 [N, K / 16]; weight_global_scale, float32 [1] |

The global scale of NVFP4 is the reciprocal of the outer one. vLLM multiplies q, k, v, and gate and up, with the largest
that it finds among them (CompressedTensorsW4A4Fp4 in vLLM 0.32), so they share one here. Outer scales are powers of
two: the values stay those of the engines (Format.alike).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qurl_ray.errors import QuantizationError
from qurl_ray.policy.experts import GPT_OSS, name_of_stored
from qurl_ray.policy.save import Take, policy_folder
from qurl_ray.policy.settings import MXFP4, reading
from qurl_ray.policy.weights import stored_tensors
from qurl_ray.quant.equalize import Factors, equalized
from qurl_ray.quant.formats import FORMATS, Format, get_format
from qurl_ray.quant.quantize import QTensor, quantize
from qurl_ray.quant.units import units

_SCALE, _SHAPE, _GLOBAL = "_scale", "_shape", "_global_scale"  # appended to a weight's name
_FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv") | dict.fromkeys(("gate_proj", "up_proj"), "gate_up")
"""Linears of a module that vLLM multiplies as one, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedPolicy:
    """Contents of a quantized checkpoint."""

    fmt: Format
    """Format of the codes; weight_max is the largest code found, 63 if it was made for a kernel that takes no more."""
    parameters: dict[str, torch.Tensor | QTensor]
    """Parameters by name, with codes and scales as stored; tied parameters once."""


def save_quantized(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    fmt: Format,
    keep: Sequence[str],
    factors: Mapping[str, Factors] | None = None,
) -> None:
    """Write a model's codes, scales, settings and tokenizer; see quantized_folder."""
    with quantized_folder(model, tokenizer, folder, fmt, keep, factors) as take:
        for name, parameter in model.named_parameters():
            take(name, parameter)


@contextmanager
def quantized_folder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    fmt: Format,
    keep: Sequence[str],
    factors: Mapping[str, Factors] | None = None,
) -> Iterator[Take]:
    """Yield a callback that takes the parameters of a policy, and write them as codes and scales, with settings and
    tokenizer, as policy.save.policy_folder does.

    The parameters are exported as they are, update-aware scaling included: a folded network computes the same function,
    and its codes are those that the engines generated with and were evaluated with.

    Args:
        model: its architecture; its weights are not looked at.
        keep: `quantization.keep`, patterns of the parameters that are not quantized.
        factors: factors of equalization, by module. They become part of the weights, so that any reader computes
            the same as the engines.

    Raises:
        QuantizationError: the format does not exist in compressed-tensors, or has no such experts, or a weight is not
            finite.
    """
    if fmt.name not in _SETTINGS:
        raise QuantizationError(f"{fmt.name} cannot be exported yet, only {', '.join(_SETTINGS)} can")
    if model.config.model_type == GPT_OSS:
        raise QuantizationError(
            f"{type(model).__name__} cannot be exported in {fmt.name}: no reader of compressed-tensors knows codes of "
            "its experts: set export.quantized=none"
        )
    quantized = units(model, keep)
    ignored = [unit.module for name, unit in units(model).items() if name not in quantized]
    together = fused(quantized)
    held: dict[str, QTensor] = {}
    with policy_folder(model, tokenizer, folder, _SETTINGS[fmt.name] | {"ignore": ignored}) as add:

        def take(name: str, parameter: torch.Tensor) -> None:
            ((_, value),) = equalized([(name, parameter.detach())], factors or {})
            if name not in quantized:
                add(name, value)
                return
            held[name] = quantize(value, fmt)
            if not held.keys() >= set(together[name]):
                return
            weights = {each: held.pop(each) for each in together[name]}
            for each, parts in zip(weights, fmt.alike([q.parts for q in weights.values()]), strict=True):
                for stored, tensor in _stored(each, QTensor.of(parts, fmt)).items():
                    add(stored, tensor)

        yield take


def is_quantized_checkpoint(folder: Path) -> bool:
    """Return True if the folder's config.json has settings of quantization, of any kind but that of gpt-oss's
    checkpoints, which are dequantized when they are read.

    Raises:
        ConfigError: it cannot be read.
    """
    with reading(str(folder)):
        settings = json.loads((folder / "config.json").read_text()).get("quantization_config")
        return settings is not None and settings.get("quant_method") != MXFP4


def read_quantized(folder: Path) -> QuantizedPolicy:
    """Read codes, scales and values of a checkpoint that `save_quantized` wrote.

    Raises:
        QuantizationError: the checkpoint is quantized in another way, or holds no codes.
        ConfigError: a file is missing or damaged.
    """
    settings = json.loads((folder / "config.json").read_text())
    config = settings["quantization_config"]
    name = next((name for name, settings in _SETTINGS.items() if _matches(config, settings)), None)
    if name is None:
        raise QuantizationError(
            f"{folder} is quantized in a way that is not known here ({config.get('quant_method')}, "
            f"{config.get('format')}); known are those of {', '.join(_SETTINGS)}"
        )
    tensors: dict[str, torch.Tensor] = {}
    for part in {tensor.file for tensor in stored_tensors(folder).values()}:
        tensors |= load_file(part)
    fmt = get_format(name)
    weights = [key.removesuffix(_SCALE) for key in tensors if key.endswith(".weight" + _SCALE)]
    needed = {_codes_name(weight, fmt) for weight in weights} | {weight + _GLOBAL for weight in weights if fmt.whole}
    if not weights or not tensors.keys() >= needed:
        raise QuantizationError(f"{folder} lacks codes or scales of its linears; export the policy again")
    if not fmt.codec:
        fmt = get_format(name, max(int(tensors[key].float().abs().max()) for key in weights))
    codes = {key: _read(tensors, key, fmt) for key in weights}
    held: dict[str, torch.Tensor | QTensor] = {**tensors, **codes}
    own = {name_of_stored(settings["model_type"], key): value for key, value in held.items()}
    return QuantizedPolicy(fmt=fmt, parameters=own)


def fused(names: Iterable[str]) -> dict[str, list[str]]:
    """Return for each weight the names of those that vLLM multiplies together with it, itself included."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        groups.setdefault(_group(name), []).append(name)
    return {name: group for group in groups.values() for name in group}


def _group(name: str) -> tuple[str, str]:
    module, _, part = name.removesuffix(".weight").rpartition(".")
    return module, _FUSED.get(part, part)


def _matches(given: dict, expected: dict) -> bool:
    """Return True if every setting of `expected` is in `given`, which may hold more."""
    return all(
        _matches(given.get(key) or {}, value) if isinstance(value, dict) else given.get(key) == value
        for key, value in expected.items()
    )


def _codes_name(name: str, fmt: Format) -> str:
    """Return the name of a weight's codes in a checkpoint."""
    return name + "_packed" if fmt.codec and fmt.dtype == torch.uint8 else name


def _stored(name: str, q: QTensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight in a checkpoint, by their names."""
    codes, scale = q.codes, q.scale
    if q.fmt.whole:
        outer = {name + _GLOBAL: 1 / q.more[0][0]}
        return {name + "_packed": codes, name + _SCALE: scale.view(torch.float8_e4m3fn), **outer}
    if q.fmt.name == "int4":
        return {name + "_packed": codes.view(torch.int32), name + _SCALE: scale, name + _SHAPE: torch.tensor(q.shape)}
    return {_codes_name(name, q.fmt): codes, name + _SCALE: scale}


def _read(tensors: dict[str, torch.Tensor], name: str, fmt: Format) -> QTensor:
    """Take the tensors of a weight out of a checkpoint's, and return its codes; the inverse of `_stored`."""
    tensors.pop(name + _SHAPE, None)
    codes, scale = tensors.pop(_codes_name(name, fmt)), tensors.pop(name + _SCALE)
    if fmt.whole:
        outer_N1 = (1 / tensors.pop(name + _GLOBAL)).expand(len(codes), 1).contiguous()
        return QTensor.of([codes, scale.view(torch.uint8), outer_N1], fmt)
    return QTensor.of([codes.view(torch.uint8), scale if scale.dtype == torch.uint8 else scale.float()], fmt)


def _settings(fmt: Format, form: str, bits: int = 8, kind: str = "float") -> dict:
    """Describe a format by settings of compressed-tensors, in which its name is `form`."""
    common: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True}
    weights: dict[str, Any] = {"strategy": "channel"}
    inputs: dict[str, Any] = {"strategy": "token"}
    if fmt.rows > 1:
        weights = {"strategy": "block", "block_structure": [fmt.rows, fmt.group]}
        inputs = {"strategy": "group", "group_size": fmt.activation_group}
    elif fmt.group:
        weights = {"strategy": "group", "group_size": fmt.group}
    if fmt.codec and kind == "float":
        weights["scale_dtype"] = "torch.uint8"
    if fmt.whole:
        weights |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    group = {"targets": ["Linear"], "weights": common | weights | {"dynamic": False}}
    if fmt.activation_max:
        group["input_activations"] = common | inputs | {"dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


_SETTINGS = {
    "int8": _settings(FORMATS["int8"], "int-quantized", kind="int"),
    "fp8": _settings(FORMATS["fp8"], "float-quantized"),
    "fp8_block": _settings(FORMATS["fp8_block"], "float-quantized"),
    "int4": _settings(FORMATS["int4"], "pack-quantized", bits=4, kind="int"),
    "mxfp4": _settings(FORMATS["mxfp4"], "mxfp4-pack-quantized", bits=4),
    "mxfp8": _settings(FORMATS["mxfp8"], "mxfp8-quantized"),
    "nvfp4": _settings(FORMATS["nvfp4"], "nvfp4-pack-quantized", bits=4),
}
"""`quantization_config` of each format that can be exported, by name, without `ignore`."""
