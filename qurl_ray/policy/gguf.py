"""Policies from GGUF files, dequantized to float32 once and kept in the cache folder as plain checkpoints."""

import hashlib
import importlib.util
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from qurl_ray.cache import cache_root
from qurl_ray.config.paths import expanded
from qurl_ray.errors import ConfigError
from qurl_ray.policy.load import Outline, outline_of
from qurl_ray.policy.save import save_policy
from qurl_ray.policy.settings import reading
from qurl_ray.policy.weights import check_loaded
from qurl_ray.types import PolicySpec

_CHUNK = 1 << 22


def cached_gguf_policy(path: str) -> Path:
    """Return the folder of the dequantized policy; create it if it does not exist yet.

    Args:
        path: path of the file, or <package>/<file> for a file inside an installed Python package.

    Raises:
        ConfigError: the file does not exist, lacks tensors, or transformers cannot read it.
    """
    file = find_gguf(path)
    folder = _folder(file)
    if (folder / "config.json").is_file():
        return folder
    with reading(str(file)):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model, info = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            output_loading_info=True,
        )
    check_loaded(file, model, info | {"unexpected_keys": ()})  # a file may hold tables of angles beside the weights
    model.hf_quantizer = None  # otherwise it would be saved, and loaded, as a quantized model
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    save_policy(model, tokenizer, folder)
    return folder


def converted(path: str) -> Path | None:
    """Return the folder of the dequantized policy; None if it does not exist yet. See `cached_gguf_policy`."""
    folder = _folder(find_gguf(path))
    return folder if (folder / "config.json").is_file() else None


def gguf_outline(path: str, max_length: int | None) -> Outline:
    """Return the outline from the file's header. Tensors are neither read, nor compared with it, nor written.

    Args:
        path: see `cached_gguf_policy`.
        max_length: see PolicySpec.

    Raises:
        ConfigError: see `cached_gguf_policy` and `outline_of`.
    """
    file = find_gguf(path)
    with reading(str(file)):
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return outline_of(config, tokenizer, PolicySpec(source=str(file), max_length=max_length))


def find_gguf(path: str) -> Path:
    """Return the path of the file, on disk or in an installed package.

    Raises:
        ConfigError: the file is in neither place.
    """
    file = expanded(path)
    if file.is_file():
        return file
    package, _, inside = path.partition("/")
    if package.isidentifier() and inside:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            if (Path(root) / inside).is_file():
                return Path(root) / inside
        if not spec:
            raise ConfigError(f"model.path={path}: no such file, and no installed Python package {package!r}")
    raise ConfigError(f"model.path={path}: no such file")


def _folder(file: Path) -> Path:
    """Folder of the dequantized policy, which has a digest of the file in its name."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return cache_root() / f"gguf-{digest.hexdigest()[:16]}"
