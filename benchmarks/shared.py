"""Shared code of the benchmarks: the repository's folder, and the line that names the machine above a table."""

import os
import platform
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def machine() -> str:
    """Return processor, cores, versions and date, for the heading of a table."""
    flags = torch.backends.cpu.get_cpu_capability()
    vnni = ", VNNI" if torch.cpu._is_vnni_supported() else ""
    amx = ", AMX" if torch.cpu._is_amx_tile_supported() else ""
    return (
        f"{platform.machine()} with {flags}{vnni}{amx}, {os.cpu_count()} cores; "
        f"torch {torch.__version__}; {date.today().isoformat()}"
    )
