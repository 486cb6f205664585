"""Shared code of the benchmarks: the repository's folder, and the line that names the machine above a table."""

import json
import os
from datetime import date
from pathlib import Path
from typing import Any

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


class Figures:
    """Figures of a benchmark by name, in a JSON file that is written after every one; those that it holds stay."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.values: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
        self.values["machine"] = machine()

    def keep(self, name: str, value: Any) -> None:
        """Write a figure, and print it."""
        self.values[name] = value
        self._out.write_text(json.dumps(self.values, indent=1) + "\n")
        print(name, json.dumps(value), flush=True)

    def add(self, name: str, value: Any, place: int) -> None:
        """Put a value at this place of a list, after those before it."""
        self.keep(name, [*self.values.get(name, [])[:place], value])
