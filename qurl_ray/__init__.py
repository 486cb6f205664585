"""Reinforcement learning of language models with quantized rollouts, on Ray."""

import os

__version__ = "0.1.0"

# Intel MKL's documented strict reproducibility mode: a row of a matrix product then depends on that
# row alone, not on how many rows or threads share the call. Engine and learner agree to the bit
# because of it (docs/concepts.md). MKL reads the variable once, so it is set before torch is used.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
