"""Write the quantized policy for stock vLLM and transformers, and read it back with exactly the codes that it holds.

The format is compressed-tensors (https://github.com/vllm-project/compressed-tensors): config.json describes how the
linears are quantized, the safetensors hold codes under "<linear>.weight" and scales [N, 1] under
"<linear>.weight_scale". All other tensors keep their precision. Scales are float32, as the engines use them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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

_SCALE = "_scale"  # appended to a weight's name


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
        raise QuantizationError(f"{fmt.name} cannot be exported yet, only {' and '.join(_SETTINGS)} can")
    if model.config.model_type == GPT_OSS:
        raise QuantizationError(
            f"{type(model).__name__} cannot be exported in {fmt.name}: no reader of compressed-tensors knows codes of "
            "its experts: set export.quantized=none"
        )
    quantized = units(model, keep)
    ignored = [unit.module for name, unit in units(model).items() if name not in quantized]
    with policy_folder(model, tokenizer, folder, _SETTINGS[fmt.name] | {"ignore": ignored}) as add:

        def take(name: str, parameter: torch.Tensor) -> None:
            ((_, value),) = equalized([(name, parameter.detach())], factors or {})
            if name not in quantized:
                add(name, value)
                return
            q = quantize(value, fmt)
            add(name, q.codes)
            add(name + _SCALE, q.scale)

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
            f"{config.get('format')}); known are 8-bit codes per output channel, {' and '.join(_SETTINGS)}"
        )
    tensors: dict[str, torch.Tensor] = {}
    for part in {tensor.file for tensor in stored_tensors(folder).values()}:
        tensors |= load_file(part)
    weights = [key.removesuffix(_SCALE) for key in tensors if key.endswith(".weight" + _SCALE)]
    if not weights or not tensors.keys() >= set(weights):
        raise QuantizationError(f"{folder} lacks codes or scales of its linears; export the policy again")
    fmt = get_format(name, max(int(tensors[key].float().abs().max()) for key in weights))
    scales = {key: tensors.pop(key + _SCALE).float() for key in weights}
    codes = {key: QTensor(codes=tensors[key], scale=scale, fmt=fmt) for key, scale in scales.items()}
    held: dict[str, torch.Tensor | QTensor] = {**tensors, **codes}
    own = {name_of_stored(settings["model_type"], key): value for key, value in held.items()}
    return QuantizedPolicy(fmt=fmt, parameters=own)


def _matches(given: dict, expected: dict) -> bool:
    """Return True if every setting of `expected` is in `given`, which may hold more."""
    return all(
        _matches(given.get(key) or {}, value) if isinstance(value, dict) else given.get(key) == value
        for key, value in expected.items()
    )


def _settings(fmt: Format) -> dict:
    """Describe a format of 8-bit codes, per output channel and per token, by settings of compressed-tensors."""
    kind = "float" if fmt.dtype.is_floating_point else "int"
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": common | {"strategy": "channel", "dynamic": False},
        "input_activations": common | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


_SETTINGS = {
    name: _settings(fmt) for name, fmt in FORMATS.items() if fmt.group is None and fmt.activation_max is not None
}
"""`quantization_config` of each format that can be exported, by name, without `ignore`."""
