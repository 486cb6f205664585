"""Identification of the processor."""

from contextlib import suppress
from pathlib import Path

import torch


def cpuinfo() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo for the first processor, by name; {} on systems without it."""
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    return {}


def processor_name() -> str:
    """Return the processor's name, family and model, and the widest vectors that torch uses.

    Example:
        "AMD EPYC, family 26, model 2, AVX512"
    """
    info = cpuinfo()
    parts = [info.get("model name", "unknown CPU")]
    parts += [f"{key.removeprefix('cpu ')} {info[key]}" for key in ("cpu family", "model") if key in info]
    return ", ".join([*parts, torch.backends.cpu.get_cpu_capability()])
