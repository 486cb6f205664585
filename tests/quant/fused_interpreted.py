"""quant/fused.py in Triton's interpreter, in a process of its own: TRITON_INTERPRET is read when kernels are made.

python fused_interpreted.py IN OUT reads tensors by name, and writes what every quantizer makes of each.
"""

import sys

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from qurl_ray.quant import fused
from qurl_ray.quant.formats import FORMATS

convert = InterpreterBuilder.create_fp_to_fp


def to_nearest(self, src, dst_type, rounding_mode):
    """Convert to E4M3 by torch, to nearest, ties to even, as a GPU does, and back: the interpreter loses carries and
    nan, and cuts subnormal numbers off."""
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


InterpreterBuilder.create_fp_to_fp, InterpreterBuilder.create_fma = to_nearest, once_rounded


def made(x: torch.Tensor) -> dict:
    found: dict = {}
    for name, fmt in FORMATS.items():
        found["blocks", name] = fused.blocks(x, fmt) if x.shape[1] % (fmt.group or 1) == 0 else None
        if fmt.activation_max and x.shape[1] % (fmt.activation_group or 1) == 0:
            found["rows", name] = fused.rows(x, fmt, len(x) + 3)
        if fmt.activation_group and x.shape[1] % fmt.activation_group == 0:
            found["columns", name] = fused.columns(x, None, fmt)
            found["columns of codes", name] = fused.columns(*fused.rows(x, fmt, len(x)), fmt)
    sums = (1000 * x.nan_to_num()).clamp(-2e9, 2e9).to(torch.int32)
    scale, amax = x.abs().amax(dim=0) * 1e-3, x.abs().amax(dim=1, keepdim=True)
    for bias in (None, x[0]):
        found["scaled", bias is None] = fused.scaled(sums, scale, amax, bias, torch.float32)
    return found


torch.save({name: made(x) for name, x in torch.load(sys.argv[1]).items()}, sys.argv[2])
