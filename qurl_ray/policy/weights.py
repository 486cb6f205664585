"""Check that the safetensors of a model's folder hold the tensors of its architecture. Only their headers are read.

`from_pretrained` gives tensors that the files lack random values, with a warning at most, so a damaged folder would
train on noise.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from qurl_ray.errors import ConfigError
from qurl_ray.policy.experts import GPT_OSS, mixture_of
from qurl_ray.policy.stacked import BLOCKS, SCALES, stored_shapes

_TRAINABLE = ("F64", "F32", "F16", "BF16")
_BYTES = "U8"
_PICKLES = ("*.bin", "*.pt", "*.pth")
HEAD = "lm_head.weight"
_SHOWN = 3  # tensors or files that a message names; it counts the others

# transformers lists in a table on the console the faults that are an error here.
logging.get_logger("transformers.modeling_utils").addFilter(lambda record: "LOAD REPORT" not in record.getMessage())


class Stored(NamedTuple):
    """A tensor as the header of its file describes it."""

    file: Path
    dtype: str
    """Type of the elements as safetensors names it: "BF16"."""
    shape: tuple[int, ...]


def stored_tensors(folder: Path, named: str | None = None) -> dict[str, Stored]:
    """Return the tensors of the files from which transformers would load a model, by name.

    Args:
        named: file or index that the model's settings name in place of the usual ones.

    Raises:
        ConfigError: the folder holds no safetensors, or a file of them is missing or damaged.
    """
    stored: dict[str, Stored] = {}
    for file in _files(folder, named):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no mapping
                    part = opened.get_slice(name)
                    stored[name] = Stored(file, part.get_dtype(), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} is damaged, or no safetensors file: {error}; get it again") from None
    return stored


def check_weights(source: Path, model: PreTrainedModel, stored: Mapping[str, Stored]) -> None:
    """Check that `stored` holds the weights of `model` and nothing else, in types that can be trained.

    transformers itself compares them, so tied weights, prefixes, and tensors that it renames or ignores are treated as
    in a load.

    Args:
        source: folder of the policy, for messages.
        model: policy on the meta device.

    Raises:
        ConfigError: tensors are missing, unexpected, of another shape, or integers or codes; the message names some.
    """
    load = _compare if mixture_of(model.config) else _load
    check_loaded(source, model, load(model, stored))
    codes = {name: tensor.dtype for name, tensor in stored.items() if tensor.dtype not in _types(model, name)}
    if codes and load(model, {name: stored[name] for name in stored if name not in codes})["missing_keys"]:
        raise ConfigError(
            f"{source} holds tensors of types that cannot be trained: "
            f"{_some(f'{name} {dtype}' for name, dtype in codes.items())}; use the model in full precision"
        )


def _types(model: PreTrainedModel, name: str) -> tuple[str, ...]:
    """Return the types that a tensor may have: bytes if it is one of MXFP4, which is dequantized (policy.stacked)."""
    packed = name.endswith((BLOCKS, SCALES)) and model.config.model_type == GPT_OSS
    return (_BYTES,) if packed else _TRAINABLE


def check_loaded(source: Path, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raise ConfigError if `info`, the report of `from_pretrained`, names tensors that did not fit."""
    shapes = [f"{name} {list(shape)}, expected {list(wanted)}" for name, shape, wanted in info["mismatched_keys"]]
    kinds = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"], "of another shape": shapes}
    if faults := [f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds.items() if names]:
        raise ConfigError(
            f"{source} does not hold exactly the tensors of the {type(model).__name__} that its settings describe: "
            f"{', '.join(faults)}; get the model again"
        )


def same_values(stored: Mapping[str, Stored], *names: str) -> bool:
    """Return True if the tensors of these names hold the same values. They are read."""
    values = []
    for name in names:
        with safe_open(stored[name].file, framework="pt") as opened:
            values.append(opened.get_tensor(name))
    return all(torch.equal(value, values[0]) for value in values[1:])


def _load(model: PreTrainedModel, stored: Mapping[str, Stored]) -> dict[str, Any]:
    """Let transformers load tensors without data into another model of the same settings; return its report."""
    tensors = {name: torch.empty(tensor.shape, device="meta") for name, tensor in stored.items()}
    _, info = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=tensors,
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    return info


def _compare(model: PreTrainedModel, stored: Mapping[str, Stored]) -> dict[str, Any]:
    """Return the report of a load by the hub's names, as experts are loaded here: transformers' own conversion of
    experts does not say which of them is damaged."""
    wanted: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        wanted |= stored_shapes(model.config, name, parameter.shape, stored)
    tied = {HEAD} if model.config.tie_word_embeddings else set()
    both = wanted.keys() & stored.keys()
    return {
        "missing_keys": wanted.keys() - stored.keys(),
        "unexpected_keys": stored.keys() - wanted.keys() - tied,
        "mismatched_keys": [(n, stored[n].shape, wanted[n]) for n in sorted(both) if stored[n].shape != wanted[n]],
    }


def _files(folder: Path, named: str | None) -> list[Path]:
    single, index = folder / (named or SAFE_WEIGHTS_NAME), folder / (named or SAFE_WEIGHTS_INDEX_NAME)
    if single.suffix == ".safetensors" and single.is_file():
        return [single]
    if not index.is_file():
        if pickles := sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern)):
            raise ConfigError(
                f"{folder} holds its weights as pickles ({_some(pickles)}), which can run code when they are loaded: "
                "convert them to safetensors with from_pretrained and save_pretrained"
            )
        raise ConfigError(f"{folder} holds no weights: neither {single.name} nor {index.name}")
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / shard for shard in shards]
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} cannot be read ({type(error).__name__}: {error}); get it again") from None
    if absent := [file.name for file in files if not file.is_file()]:
        raise ConfigError(
            f"{folder} lacks {len(absent)} of the {len(files)} files that {index.name} names: {_some(absent)}"
        )
    return files


def _some(names: Iterable[str]) -> str:
    """Return the first of these in natural order, and the number of the others."""
    ordered = sorted(
        names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    )
    more = len(ordered) - _SHOWN
    return ", ".join(ordered[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
