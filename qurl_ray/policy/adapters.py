"""LoRA adapters (https://arxiv.org/abs/2106.09685): a linear computes W x + (α/r) · B (A x); only A and B are trained.

The names, the initial values and the files are those of PEFT. peft itself is not used: its linear multiplies with
torch's own product, whose rows depend on the batch, so that engine and learner would differ.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from qurl_ray.config.lora import LoraConfig
from qurl_ray.errors import ConfigError
from qurl_ray.extensions import did_you_mean
from qurl_ray.numerics.products import ADAPTER_FACTORS, AdapterFactor, ExactLinear
from qurl_ray.policy.forward import set_forward
from qurl_ray.policy.save import replaced
from qurl_ray.quant.equalize import Factors, read_factors, write_factors
from qurl_ray.types import Adapters

ALL_LINEAR = "all_linear"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BASE, _EQUALIZATION = "qurl_base.json", "qurl_equalization.safetensors"
"""Files of an adapter that was trained over codes; peft does not read them."""
_RECORDED = ("format", "weight_max_code", "names", "fingerprint")
_PREFIX = "base_model.model."
"""Prefix of the names of parameters in PEFT's files."""
# Settings of PEFT that change what an adapter computes, each with the value that is known here.
_PLAIN: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "layer_replication": None,
    "layers_to_transform": None,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


def adapters_of(settings: LoraConfig) -> Adapters:
    """Return the record of the adapters that the settings ask for."""
    return Adapters(rank=settings.rank, alpha=settings.alpha, targets=settings.targets)


def target_modules(model: nn.Module, adapters: Adapters) -> list[str]:
    """Return the names of the linears that get an adapter, in the model's order.

    Raises:
        ConfigError: a target matches no linear, or the rank exceeds a side of one.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, ExactLinear) and module is not head
    }
    chosen: set[str] = set()
    for target in adapters.targets:
        matches = [name for name in linears if _matches(name, target)]
        if not matches:
            last = sorted({name.rpartition(".")[2] for name in linears})
            raise ConfigError(
                f"learner.lora.targets: {type(model).__name__} has no linear {target!r} outside its head"
                f"{did_you_mean(target, last)} (it has {', '.join(last)}; {ALL_LINEAR} takes them all)"
            )
        chosen.update(matches)
    for name in chosen:
        least = min(linears[name].out_features, linears[name].in_features)
        if adapters.rank > least:
            raise ConfigError(
                f"learner.lora.rank={adapters.rank} is more than the rank of {name}, {least}: choose at most {least}"
            )
    return [name for name in linears if name in chosen]


def is_target(module: str, adapters: Adapters) -> bool:
    """Return True if a linear of this name, which is not the head, gets an adapter."""
    return any(_matches(module, target) for target in adapters.targets)


def _matches(module: str, target: str) -> bool:
    return target in (ALL_LINEAR, module) or module.endswith(f".{target}")


def add_adapters(model: nn.Module, adapters: Adapters, *, seed: int = 0) -> list[str]:
    """Give the model's linears adapters, in place, that change nothing yet: A is random, B is zero, as in PEFT. Returns
    the names of these linears. Nothing but the adapters has a gradient from now on.

    Args:
        seed: together with a linear's name, it determines A.

    Raises:
        ConfigError: see target_modules.
    """
    names = target_modules(model, adapters)
    model.requires_grad_(False)
    for name in names:
        linear: Any = model.get_submodule(name)
        like = {"bias": False, "device": linear.weight.device, "dtype": linear.weight.dtype}
        linear.lora_A = AdapterFactor(linear.in_features, adapters.rank, **like)
        linear.lora_B = AdapterFactor(adapters.rank, linear.out_features, **like)
        linear.lora_B.scaling = adapters.scaling
        if not linear.weight.is_meta:
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
            random = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            bound = linear.in_features**-0.5  # kaiming_uniform with a = √5
            values = torch.rand(adapters.rank, linear.in_features, generator=random) * (2 * bound) - bound
            linear.lora_A.weight.data.copy_(values)
            nn.init.zeros_(linear.lora_B.weight)
        set_forward(linear, _with_adapter)
    return names


def move_adapter(before: nn.Module, after: nn.Module) -> None:
    """Give the adapter of a linear, if it has one, to the linear that replaces it."""
    if hasattr(before, "lora_A"):
        after.lora_A, after.lora_B = before.lora_A, before.lora_B
        set_forward(after, _with_adapter)


def plus_adapter(linear: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return y + B ((α/r) · A x) with the adapter of a linear, or y if it has none."""
    if not hasattr(linear, "lora_A"):
        return y
    factors: Any = linear
    return y + factors.lora_B(factors.lora_A(x) * factors.lora_B.scaling)


def _with_adapter(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return plus_adapter(linear, x, type(linear).forward(linear, x))


def merged(
    parameters: Iterable[tuple[str, torch.Tensor]], adapter: Mapping[str, torch.Tensor], scaling: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of the base model with the adapter added to their values, in float64 before they are rounded
    to their type."""
    for name, parameter in parameters:
        path = name.removesuffix(".weight")
        first, second = (adapter.get(f"{path}.{factor}.weight") for factor in ADAPTER_FACTORS)
        if first is not None and second is not None:
            product = second.detach().double() @ first.detach().double()
            parameter = (parameter.detach().double() + product.mul_(scaling)).to(parameter.dtype)
        yield name, parameter


# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedBase:
    """Codes over which an adapter was trained: how they are made from the base model, and their fingerprint."""

    format: str
    weight_max_code: int
    names: tuple[str, ...]
    """Names of the parameters that are codes."""
    fingerprint: str
    """Sum of the fingerprints of codes and scales, 16 hexadecimal digits."""
    factors: Mapping[str, Factors]
    """Factors of equalization with which the codes are made, by module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """Contents of a PEFT folder."""

    adapters: Adapters
    base: str
    """Folder or hub id of the base model."""
    parameters: dict[str, torch.Tensor]
    """Values by name, as in a model with adapters."""
    coded: CodedBase | None = None
    """Codes over which it was trained; None for an adapter of weights."""


def is_adapter(folder: Path) -> bool:
    """Return True if a folder holds an adapter in PEFT's layout."""
    return (folder / CONFIG).is_file()


def save_adapter(
    folder: Path, saved: SavedAdapter, modules: Iterable[str], tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write an adapter as peft does, and beside it the record of its codes. The folder is never half written.

    Args:
        modules: names of the linears that have an adapter.
        tokenizer: written, too, if there is one; else the base model's is used.
    """
    adapters = saved.adapters
    last = sorted({name.rpartition(".")[2] for name in modules})
    targets = [name for target in adapters.targets for name in (last if target == ALL_LINEAR else [target])]
    settings = {
        "base_model_name_or_path": saved.base,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": adapters.rank,
        "target_modules": sorted(set(targets)),
        "task_type": "CAUSAL_LM",
    }
    with replaced(folder) as aside:
        (aside / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        tensors = {_PREFIX + name: value.detach().cpu().contiguous() for name, value in saved.parameters.items()}
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        if tokenizer:
            tokenizer.save_pretrained(aside)
        if saved.coded:
            record = {name: getattr(saved.coded, name) for name in _RECORDED}
            (aside / _BASE).write_text(json.dumps(record, indent=2) + "\n")
            write_factors(aside / _EQUALIZATION, saved.coded.factors)


def read_adapter(folder: Path) -> SavedAdapter:
    """Read an adapter that peft or `save_adapter` wrote.

    Raises:
        ConfigError: a file is missing or damaged, or the adapter is of another kind than LoRA on plain linears.
    """
    try:
        settings = json.loads((folder / CONFIG).read_text())
        rank, alpha, targets = settings["r"], settings["lora_alpha"], settings["target_modules"]
        tensors = load_file(folder / WEIGHTS)
        coded = None
        if (folder / _BASE).is_file():
            record = json.loads((folder / _BASE).read_text())
            record["names"] = tuple(record["names"])
            coded = CodedBase(**record, factors=read_factors(folder / _EQUALIZATION))
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise ConfigError(f"{folder} holds no LoRA adapter of PEFT: {type(error).__name__}: {error}") from None
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"{folder} holds an adapter of the kind {settings.get('peft_type')}: only LORA is known")
    for name, known in _PLAIN.items():
        if settings.get(name, known) not in (known, None):
            raise ConfigError(f"{folder}: {CONFIG} has {name}={settings[name]!r}, which is not known here")
    if isinstance(targets, str) and targets not in ("all-linear", ALL_LINEAR):
        raise ConfigError(f"{folder}: {CONFIG} has target_modules={targets!r}: list the names of the linears")
    if strange := [name for name in tensors if not name.startswith(_PREFIX)]:
        raise ConfigError(f"{folder}: {WEIGHTS} has a tensor {strange[0]}, expected names from {_PREFIX} on")
    return SavedAdapter(
        adapters=Adapters(
            rank=rank, alpha=alpha, targets=(ALL_LINEAR,) if isinstance(targets, str) else tuple(targets)
        ),
        base=settings["base_model_name_or_path"] or "",
        parameters={name.removeprefix(_PREFIX): value for name, value in tensors.items()},
        coded=coded,
    )


def check_shapes(model: nn.Module, saved: SavedAdapter) -> None:
    """Check that the linears of a model can have a saved adapter. The model may have other modules in their places.

    Raises:
        ConfigError: a linear is not there, or is of another shape.
    """
    linears = {name: module for name, module in model.named_modules() if hasattr(module, "out_features")}
    rank = saved.adapters.rank
    for name, value in saved.parameters.items():
        path, _, factor = name.removesuffix(".weight").rpartition(".")
        linear: Any = linears.get(path)
        inputs = getattr(linear, "in_features", value.shape[-1])  # rows of a fused linear do not say it
        wanted = (rank, inputs) if factor == ADAPTER_FACTORS[0] else (getattr(linear, "out_features", 0), rank)
        if factor not in ADAPTER_FACTORS or tuple(value.shape) != wanted:
            raise ConfigError(
                f"the adapter has {name} of {tuple(value.shape)}, and the model's linear takes {wanted}: it was "
                "trained on another base model"
            )


@torch.no_grad()
def load_adapter(model: nn.Module, saved: SavedAdapter, folder: Path) -> None:
    """Write the values of a saved adapter into those that `add_adapters` has made.

    Raises:
        ConfigError: the model's adapters are others.
    """
    held = {name: p for name, p in model.named_parameters() if name.split(".")[-2] in ADAPTER_FACTORS}
    shapes = {name: tuple(value.shape) for name, value in held.items()}
    saved_shapes = {name: tuple(value.shape) for name, value in saved.parameters.items()}
    if shapes != saved_shapes:
        differing = sorted(set(shapes.items()) ^ set(saved_shapes.items()))
        raise ConfigError(
            f"{folder} holds an adapter of another shape, or for another model: {len(saved_shapes)} tensors, the run "
            f"has {len(shapes)}; they differ in {differing[0][0]}. learner.lora.rank and targets must be the adapter's "
            f"({saved.adapters.rank}, {', '.join(saved.adapters.targets)})"
        )
    for name, value in held.items():
        value.copy_(saved.parameters[name])
