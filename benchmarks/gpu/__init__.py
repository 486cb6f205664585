"""Benchmarks of this package on one GPU, in ten minutes: `python -m benchmarks.gpu`, in the repository's root.

It needs torch, transformers and the packages that qurl_ray's layers 0 to 3 import (docs/design.md): no Ray, no vLLM, no
downloads, no installation of this package. Weights are random and made on the device.

| part | what it measures |
|---|---|
| kernels | the error of each kernel, and of the three products of the unified linear, against float64 |
| unified | forward and backward of a layer's linears in FP8 blocks and in INT8, against bfloat16 |
| step | the learner's step in bfloat16 and through FP8 blocks |
| rollout | decode steps of the torch engine in bfloat16, INT8 and FP8, without and with CUDA graphs |

Speeds are measured on a few layers of a model's shape, and extrapolated to all of them. The figures have both, under
names that say which is which. None of this was measured yet.
"""
