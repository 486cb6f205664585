"""Environment variables of the libraries that torch computes with. They are set when `qurl_ray` is imported."""

import ctypes
import os
import sys
from contextlib import suppress

TORCH_WAS_FIRST = "torch" in sys.modules and "MKL_CBWR" not in os.environ
"""True if torch was imported before MKL_CBWR was set, so that MKL may have computed in another mode."""

# MKL's strict reproducibility mode. On Intel, a row of a matrix product then depends on that row alone; on AMD, only
# with four rows or more. numerics.selfcheck measures what else is needed (docs/concepts.md). MKL reads the variable
# once, at its first product, so it is set before torch is imported.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# OpenMP's threads wait in a loop before they sleep, by default for milliseconds. Where other processes want the cores,
# one waits for another that does not run (benchmarks/spinning.py). libgomp reads this when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")

# glibc gives memory back to the system as soon as it is free. Tensors of megabytes are then fetched again, page by
# page, in every operation: most of the time of a sync, and part of an update (docs/LOG.md). With these values it keeps
# up to 2 GiB, and the threads of a process share them. It reads the variables when a process starts: this process is
# told by a call, those that it starts find them.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": (-3, 2**30),
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1),
    "MALLOC_ARENA_MAX": (-8, 1),
}
"""Variables of glibc's malloc: the numbers of these parameters in mallopt(3), and their values."""
# Memory that a process has not had yet is fetched by pages of 2 MiB in place of 4 KiB (docs/LOG.md), where the kernel
# lets programs ask for it ("madvise" in /sys/kernel/mm/transparent_hugepage/enabled). glibc 2.35 and later read this at
# the start of a process, so it is for those that this one starts.
_TUNABLES = "GLIBC_TUNABLES"
if sys.platform == "linux":
    os.environ.setdefault(_TUNABLES, "glibc.malloc.hugetlb=1")
MEMORY = (*_MALLOC, _TUNABLES)
"""Variables that a cluster's processes are given, too."""

if sys.platform == "linux" and not _MALLOC.keys() & os.environ.keys():
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for name, (parameter, value) in _MALLOC.items():
            mallopt(parameter, value)
            os.environ[name] = str(value)
