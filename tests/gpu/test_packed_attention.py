"""Variable-length flash attention of packed rows on a GPU, against the definition.

python -m pytest -m gpu tests/gpu
"""

from dataclasses import replace

import pytest
import torch

from qurl_ray.policy.attention import varlen_attention
from tests.policy.test_attention import attend, gradients, packing_of, positions_of, random_heads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("lengths", [(40,), (1, 33, 2), (300, 5)], ids=str)
def test_the_fused_attention_is_the_invariant_one_to_rounding(lengths, dtype):
    heads = [part.to(dtype).float() for part in random_heads(8, length=sum(lengths), batch=1)]
    on_gpu = [part.to("cuda", dtype).requires_grad_() for part in heads]
    heads = [part.requires_grad_() for part in heads]
    packed, there = {}, {}
    if len(lengths) > 1:
        packed = {"packing": packing_of(*lengths)}
        there = {"packing": replace(packed["packing"], bounds=packed["packing"].bounds.cuda())}
    expected = attend(*heads, positions_of(*lengths), **packed)
    found, _ = varlen_attention(torch.nn.Identity(), *on_gpu, scaling=32**-0.5, **there)
    assert found.dtype == dtype
    off = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.float().cpu(), expected, rtol=off, atol=off)
    for one, other in zip(gradients(found, *on_gpu), gradients(expected, *heads), strict=True):
        assert float((one.float().cpu() - other).norm() / other.norm()) < off
