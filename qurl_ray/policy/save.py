"""Save a policy so that AutoModelForCausalLM.from_pretrained loads it, with or without this package."""

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from qurl_ray.policy.stacked import Stacker

FILE_BYTES = 2 * 10**9
"""Bytes of tensors from which on another file is begun; the writer holds as many."""
Take = Callable[[str, torch.Tensor], None]
"""Callback that takes the parameters of a policy, (name, values), one after the other."""


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights (safetensors), settings and tokenizer. The folder is never half written."""
    with policy_folder(model, tokenizer, folder) as take:
        for name, parameter in model.named_parameters():
            take(name, parameter)


@contextmanager
def policy_folder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    quantization: dict[str, Any] | None = None,
) -> Iterator[Take]:
    """Yield a callback that takes the tensors of a policy, and write them with its settings when the block ends. The
    folder is never half written, and never are all tensors in memory.

    Args:
        model: its architecture; its weights are not looked at, and need not be there.
        quantization: `quantization_config` for the settings.
    """
    with replaced(folder) as aside:
        files = _TensorFiles(aside)
        stacker = Stacker(model.config, files.add)
        yield stacker.add
        stacker.close()
        files.close()
        config = copy.deepcopy(model.config)
        config.architectures, config.dtype = [type(model).__name__], model.dtype
        if quantization:
            config.quantization_config = quantization
        vars(config).pop("transformers_weights", None)  # names of files that are not written here
        # Not by save_pretrained: it refuses settings of generation that contradict each other, as many policies have
        # them ("temperature" without "do_sample"). Training reads none of these, and leaves them as they are.
        config.to_json_file(aside / CONFIG_NAME)
        model.generation_config.to_json_file(aside / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
        tokenizer.save_pretrained(aside)


class _TensorFiles:
    """The safetensors of a folder, under the names by which transformers finds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, torch.Tensor] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self._held_bytes = self._bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor, which may change or be freed afterwards."""
        if self._held and self._held_bytes + tensor.nbytes > FILE_BYTES:
            self._write()
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._held_bytes += tensor.nbytes
        self._bytes += tensor.nbytes

    def close(self) -> None:
        """Write the tensors still held, and the index if there are several files."""
        self._write()
        if len(self._files) == 1:
            self._files[0][0].rename(self._folder / SAFE_WEIGHTS_NAME)
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, start=1):
            named = f"model-{number:05d}-of-{len(self._files):05d}.safetensors"
            path.rename(self._folder / named)
            weight_map |= dict.fromkeys(names, named)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
        (self._folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        path = self._folder / f"part-{len(self._files)}"
        save_file(self._held, path, metadata={"format": "pt"})
        self._files.append((path, list(self._held)))
        self._held, self._held_bytes = {}, 0


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write into, which replaces `folder` when the block ends without an error.

    The old folder is kept until then, so that a reader finds one of the two, complete.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield aside
        aside.chmod(0o755)  # mkdtemp gives no access to other users
        old = folder.with_name(f".{folder.name}-old")
        shutil.rmtree(old, ignore_errors=True)  # left by a process that was killed at this point
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
