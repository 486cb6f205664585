"""The vLLM engine: its processes, layers and kernels. Only files of this folder import vllm."""
