"""torchao's quantizers in Triton's interpreter, in a process of its own: TRITON_INTERPRET is read when they are made.

python torchao_interpreted.py IN OUT reads problems, by name (x, weight, dy), and writes for each what the quantizers
make of dy, and y, dx, dW of a unified linear. The interpreter has no bfloat16, so they get the same values in float32.
cuBLAS's product is the definition of test_unified.py.
"""

import sys

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from qurl_ray.quant import training
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.kernels import KERNELS
from qurl_ray.quant.training import products_for
from tests.quant.test_unified import gradients, hopper

store, convert = InterpreterBuilder.create_masked_store, InterpreterBuilder.create_fp_to_fp


def with_a_mask_of_bits(self, pointers, value, mask, *rest):
    """Store, with a mask that the interpreter takes: it makes integers of one that a scalar has a part in."""
    mask.data = mask.data.astype(np.bool_)
    return store(self, pointers, value, mask, *rest)


def to_nearest(self, src, dst_type, rounding_mode):
    """Convert to E4M3 by torch, to nearest, ties to even, as a GPU does: the interpreter loses carries, and cuts
    subnormal numbers off."""
    if dst_type.scalar != tl.float8e4nv:
        return convert(self, src, dst_type, rounding_mode)
    codes = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.float8_e4m3fn).view(torch.uint8)
    return TensorHandle(codes.numpy(), dst_type.scalar)


InterpreterBuilder.create_masked_store, InterpreterBuilder.create_fp_to_fp = with_a_mask_of_bits, to_nearest
torchao = training._torchao()
assert torchao, training.PRODUCTS["torchao"].objection(FORMATS["fp8_block"], torch.device("cuda"))
quantizers = {}
for side in ("lhs", "transposed_lhs", "rhs"):
    name = f"triton_fp8_blockwise_act_quant_{side}"
    tuned = getattr(torchao, f"{name}_kernel")
    # Of several, the interpreter would time each. This one has the fewest programs, which it runs one after the other.
    tuned.configs = [max(tuned.configs, key=lambda config: config.kwargs["NUM_GROUPS"])]
    quantizers[side] = getattr(torchao, name)
    setattr(torchao, name, lambda x, made=quantizers[side]: made(x.float()))
torch.nn.functional.scaled_mm = hopper
kernel = type(KERNELS["scaled_mm_block"])
kernel.device_type, kernel.lacks = "cpu", lambda *_: None

found = {}
for name, (x, weight, dy) in torch.load(sys.argv[1]).items():
    (M, N), K = dy.shape, x.shape[1]
    assert products_for(FORMATS["fp8_block"], dy.device, (M, N, K), dy.dtype).name == "torchao"
    whole = torch.nn.functional.pad(dy.float(), (0, 0, 0, -M % 128))
    found[name] = {
        "products": gradients(x, weight, None, dy, fmt=FORMATS["fp8_block"], backward="quantized"),
        "quantized": {side: made(whole) for side, made in quantizers.items() if M},
    }
torch.save(found, sys.argv[2])
