"""quant/fused.py in Triton's interpreter, in a process of its own: TRITON_INTERPRET is read when kernels are made."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def interpreted(inputs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return by name what every quantizer makes of a matrix, or y, dx and dW of a unified linear of (x, weight, dy)."""
    torch.save(inputs, folder / "in.pt")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", __name__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "out.pt")


def main(folder: Path) -> None:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

    from qurl_ray.quant import fused, kernels, quantize, training
    from qurl_ray.quant.formats import FORMATS
    from tests.quant.test_unified import BLOCK, gradients, hopper

    convert = InterpreterBuilder.create_fp_to_fp

    def to_nearest(self, src, dst_type, rounding_mode):
        """Convert to E4M3 by torch, to nearest, ties to even, as a GPU does, and back: the interpreter loses carries
        and nan, and cuts subnormal numbers off."""
        if src.dtype.scalar == tl.float8e4nv:
            return TensorHandle(torch.from_numpy(src.data).view(torch.float8_e4m3fn).float().numpy(), dst_type.scalar)
        if dst_type.scalar != tl.float8e4nv:
            return convert(self, src, dst_type, rounding_mode)
        codes = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.float8_e4m3fn).view(torch.uint8)
        return TensorHandle(codes.numpy(), dst_type.scalar)

    def once_rounded(self, x, y, z):
        """x · y + z, rounded once, as a GPU does: the interpreter rounds twice."""
        sums = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return TensorHandle(sums.astype(np.float32), x.dtype.scalar)

    def by_halves(self, input):
        """Reduce all columns at once: the interpreter would take one value after the other."""
        (one,) = input
        data = one.handle.data
        while data.shape[self.axis] > 1:
            halves = (self.to_tensor(half, one.dtype) for half in np.split(data, 2, self.axis))
            data = self.combine_fn.fn(*halves).handle.data
        return [self.to_tensor(data.squeeze(self.axis), one.dtype)]

    InterpreterBuilder.create_fp_to_fp, InterpreterBuilder.create_fma = to_nearest, once_rounded
    ReduceOps.generic_reduce = by_halves
    # From here on a CPU is a GPU, whose cuBLAS is the definition.
    for module in (kernels, quantize, training):
        module.fused_kernels = lambda *_: fused
    torch.nn.functional.scaled_mm = hopper
    kernel = type(kernels.KERNELS["scaled_mm_block"])
    kernel.device_type, kernel.lacks = "cpu", lambda *_: None

    def quantized(x: torch.Tensor) -> dict[tuple[str, Any], Any]:
        found: dict[tuple[str, Any], Any] = {("transposed", None): fused.transposed_codes(x.to(torch.int8))}
        for name, fmt in FORMATS.items():
            if fmt.codec:
                continue
            if x.shape[1] % (fmt.group or 1) == 0:
                found["blocks", name] = fused.codes_of_blocks(x, fmt)
            if fmt.activation_max and x.shape[1] % (fmt.activation_group or 1) == 0:
                found["rows", name] = fused.codes_of_rows(x, fmt, len(x) + 3)
            if fmt.activation_group and x.shape[1] % fmt.activation_group == 0:
                found["columns", name] = fused.codes_of_columns(x, None, fmt)
                found["columns of codes", name] = fused.codes_of_columns(*fused.codes_of_rows(x, fmt, len(x)), fmt)
        sums = (1000 * x.nan_to_num()).clamp(-2e9, 2e9).to(torch.int32)
        scale, amax = x.abs().amax(dim=0) * 1e-3, x.abs().amax(dim=1, keepdim=True)
        for bias in (None, x[0]):
            found["scaled", bias is not None] = fused.scaled_sums(sums, scale, amax, bias, torch.float32)
        return found

    def of_linear(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> Any:
        assert training.products_for(BLOCK, dy.device, (*dy.shape, x.shape[1])).name == "scaled_mm"
        return gradients(x, weight, None, dy, fmt=BLOCK, backward="quantized")

    asked = torch.load(folder / "in.pt")
    found = {key: of_linear(*one) if isinstance(one, tuple) else quantized(one) for key, one in asked.items()}
    torch.save(found, folder / "out.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
