"""Policies: how to get one, its log-probs, and how to save it. Engine and learner share the forward defined here."""

import os

import torch

# Read when deepspeed is imported, which transformers does where it is installed; without it DeepSpeed looks for
# accelerators by itself, and warns on the console that there is none.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
