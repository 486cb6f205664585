"""Shared code of the benchmarks: the repository's folder, and the line that names the machine above a table."""

import os
from datetime import date
from pathlib import Path

import torch

from qurl_ray.numerics.processor import processor_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> str:
    """Return processor, cores, versions and date, for the heading of a table."""
    vnni = ", VNNI" if torch.cpu._is_vnni_supported() else ""
    amx = ", AMX" if torch.cpu._is_amx_tile_supported() else ""
    return (
        f"{processor_name()}{vnni}{amx}, {os.cpu_count()} cores; torch {torch.__version__}; {date.today().isoformat()}"
    )
