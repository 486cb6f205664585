"""Policies from GGUF files, dequantized to float32 once and kept in the cache folder as plain checkpoints."""

import hashlib
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from qurl_ray.cache import cache_root
from qurl_ray.errors import ConfigError
from qurl_ray.policy.save import save_policy

_CHUNK = 1 << 22


def cached_gguf_policy(path: str) -> Path:
    """Return the folder of the dequantized policy; create it if it does not exist yet.

    Args:
        path: path of the file, or <package>/<file> for a file inside an installed Python package.

    Raises:
        ConfigError: the file does not exist, or transformers cannot read it.
    """
    file = find_gguf(path)
    folder = cache_root() / f"gguf-{_digest(file)}"
    if (folder / "config.json").is_file():
        return folder
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    except (OSError, ValueError, ImportError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"{file} cannot be read as a GGUF model: {type(error).__name__}: {error}") from None
    model.hf_quantizer = None  # otherwise it would be saved, and loaded, as a quantized model
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    save_policy(model, tokenizer, folder)
    return folder


def find_gguf(path: str) -> Path:
    """Return the path of the file, on disk or in an installed package.

    Raises:
        ConfigError: the file is in neither place.
    """
    file = Path(path).expanduser()
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


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()[:16]
