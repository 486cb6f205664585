"""Save a policy so that AutoModelForCausalLM.from_pretrained loads it, with or without this package."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights (safetensors), settings and tokenizer. The folder is never half written."""
    with replaced(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)


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
