"""Benchmarks of this package on a GPU, in 45 minutes: `python -m benchmarks.gpu`, in the repository's root.

The parts from `kernels` to `rollout` need torch, transformers and the packages that qurl_ray's layers 0 to 3 import
(docs/design.md): no Ray, no vLLM, no downloads, no installation of this package. Weights are random and made on the
machine.

| part | what it measures | needs |
|---|---|---|
| runs | whole runs that learn, by format: held-out answers, seconds by phase, syncs, probes | Ray |
| kernels | the error of each kernel, and of the three products of the unified linear, against float64 | |
| unified | forward and backward of a layer's linears in FP8 blocks and in INT8, against bfloat16 | |
| gradients | the three products of a linear in bfloat16 and in FP8 blocks | |
| step | the learner's step in bfloat16 and through FP8 blocks | |
| rollout | decode steps of the torch engine in bfloat16, INT8 and FP8, without and with CUDA graphs | |
| codes | the share of activation codes that are not the reference's, by kernel | vLLM for its kernels |
| vllm | decode steps of vLLM, of whole models, by format and batch, without and with CUDA graphs | vLLM |
| loads | log-probs after loads under graphs, against a fresh engine and the learner | vLLM for its engine |
| sleeps | sleep, wake, load, 200 times: seconds and memory | vLLM, and a GPU, for its engine |
| sync | seconds of a sync by transport, in runs | Ray |
| training | seconds of whole steps by format, in runs of a 1.5B policy | Ray |

What is missing is listed as skipped, and the other parts are measured. `step` and `rollout` measure a few layers of a
model's shape and extrapolate to all of them; the figures have both, under names that say which is which. docs/gpu.md
has what was measured so far.
"""
