"""Products of few inputs, as of a LoRA adapter: each row's bits are its own, by the rule that this machine measured."""

import pytest
import torch

from qurl_ray.numerics.products import PACK_FLOATS_AFTER, bound, linear


@pytest.mark.equal_bits
@pytest.mark.parametrize("outputs", [128, 256, 576])
@pytest.mark.parametrize("inner", [1, 2, 3, 5, 8, 16])
def test_a_row_alone_has_the_bits_that_it_has_among_others(inner, outputs):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        weight, x = torch.randn(outputs, inner, generator=generator), torch.randn(40, inner, generator=generator)
        whole, held = linear(x, weight), bound(weight, None)
        for call in range(PACK_FLOATS_AFTER + 2):  # the last ones in the order of a weight that is used often
            row = call % len(x)
            assert torch.equal(held(x[row : row + 1]), whole[row : row + 1])
            assert torch.equal(linear(x[row : row + 1], weight), whole[row : row + 1])
