"""Save a policy so that AutoModelForCausalLM.from_pretrained loads it, with or without this package."""

import copy
import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qurl_ray.quant.uaq import unfold


def save_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    uaq_scale: float = 1.0,
    uaq_layers: str = "qkv+mlp",
) -> None:
    """Write weights (safetensors), settings and tokenizer, update-aware scaling undone.

    Written aside and renamed, the old one kept until the new one is whole: a policy is never half written.
    """
    if uaq_scale != 1:
        model = copy.deepcopy(model)
        unfold(model, uaq_scale, uaq_layers)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        aside.chmod(0o755)  # mkdtemp's own mode keeps everybody else out
        old = folder.with_name(f".{folder.name}-old")
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
