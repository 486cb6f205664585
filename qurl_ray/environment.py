"""Environment variables of the libraries that torch computes with. They are set when `qurl_ray` is imported."""

import os
import sys

TORCH_WAS_FIRST = "torch" in sys.modules and "MKL_CBWR" not in os.environ
"""True if torch was imported before MKL_CBWR was set, so that MKL may have computed in another mode."""

# MKL's strict reproducibility mode. On Intel, a row of a matrix product then depends on that row alone; on AMD, only
# with four rows or more. numerics.selfcheck measures what else is needed (docs/concepts.md). MKL reads the variable
# once, at its first product, so it is set before torch is imported.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# OpenMP's threads wait in a loop before they sleep, by default for milliseconds. Where other processes want the cores,
# one waits for another that does not run (benchmarks/spinning.py). libgomp reads this when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
