"""Code inside vLLM's workers, for the parts `vllm` and `codes`."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.codes import differing, eye
from qurl_ray.engines.vllm.plugin import QurlHeadMethod, QurlLinearMethod
from qurl_ray.engines.vllm.worker import WorkerExtension
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.quantize import quantize


class Measuring(WorkerExtension):
    """Methods that are added to vLLM's worker class, beside those of a run."""

    @torch.no_grad()
    def qurl_randomize(self, format_name: str, weight_max_code: int) -> None:
        """Write random weights of this format into all linears."""
        for module, method, size in self._qurl_linears():
            weight = 0.02 * torch.randn(size, device=module.weight.device)
            fmt = None if format_name == "none" else get_format(format_name, weight_max_code)
            method.hold(module, [quantize(weight, fmt) if fmt else weight])

    def qurl_profile_start(self) -> None:
        """Record operations on the GPU from now on."""
        self._qurl_profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._qurl_profile.start()

    def qurl_profile_stop(self) -> list[tuple[str, float, int]]:
        """Return name, milliseconds on the GPU and calls of each operation, the longest first."""
        torch.cuda.synchronize()
        self._qurl_profile.stop()
        found = self._qurl_profile.key_averages()
        own = [(one.key, one.self_device_time_total / 1000, one.count) for one in found if one.self_device_time_total]
        return sorted(own, key=lambda one: -one[1])

    @torch.no_grad()
    def qurl_codes(self, format_name: str, weight_max_code: int, rows: int) -> dict[str, list[int]]:
        """Return the result of codes.differing for each size of a linear."""
        fmt, found = get_format(format_name, weight_max_code), {}
        for module, method, (outputs, inputs) in self._qurl_linears():
            key = f"{outputs} × {inputs}"
            if key in found:
                continue
            device = module.weight.device
            method.hold(module, [eye(outputs, inputs, fmt, device)])
            multiply = partial(method.apply, module)
            found[key] = differing(multiply, (outputs, inputs), fmt, rows, device, module.params_dtype)
        return found

    def _qurl_linears(self) -> Iterator[tuple[Any, QurlLinearMethod, tuple[int, int]]]:
        """Yield all linears with their method and size; a head only if it was made for codes."""
        for module in self.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, QurlLinearMethod) and (method.fmt or not isinstance(method, QurlHeadMethod)):
                yield module, method, (sum(module.output_partition_sizes), module.input_size_per_partition)
