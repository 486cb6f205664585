"""Policies: loading, log-probs and saving. Engine and learner share the forward pass that is defined here."""

import os

import torch

# DeepSpeed reads this when it is imported, which transformers does if it is installed. Without the variable, DeepSpeed
# searches for accelerators itself, and warns on the console if there is none.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
