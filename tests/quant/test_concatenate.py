"""Joining and cutting codes along the output rows, and weights that are refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import FORMATS, get_format
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import QTensor, concatenate, dequantize, quantize


def weight(rows: int, columns: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def same(one: QTensor, other: QTensor) -> bool:
    codes = torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
    return codes and all(map(torch.equal, one.parts[1:], other.parts[1:])) and one.fmt == other.fmt


@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "mxfp4", "mxfp8"])
@settings(max_examples=30, deadline=None)
@given(heights=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_rows_are_quantized_alike_alone_and_together(name, heights):
    parts = [weight(height, seed=i) for i, height in enumerate(heights)]
    quantized = [quantize(part, FORMATS[name]) for part in parts]
    whole = concatenate(quantized)
    assert same(whole, quantize(torch.cat(parts), FORMATS[name]))
    start = 0
    for q in quantized:
        assert same(whole.cut((start, start + len(q.codes))), q)
        start += len(q.codes)


def test_blocks_are_joined_and_cut_at_their_borders():
    parts = [weight(128), weight(256, seed=1), weight(70, seed=2)]  # the last may end within a block
    quantized = [quantize(part, FORMATS["fp8_block"]) for part in parts]
    whole = concatenate(quantized)
    assert same(whole, quantize(torch.cat(parts), FORMATS["fp8_block"]))
    assert same(whole.cut((128, 384)), quantized[1])
    assert same(whole.cut((384, 454)), quantized[2])
    with pytest.raises(QuantizationError, match="70 rows end within a block of 128"):
        concatenate(quantized[::-1])
    for start, stop in ((64, 128), (0, 100)):
        with pytest.raises(QuantizationError, match="cut through blocks of 128"):
            whole.cut((start, stop))


@pytest.mark.parametrize(("start", "stop"), [(0, 9), (-1, 4), (3, 3), (5, 2)])
def test_rows_that_are_not_there_are_refused(start, stop):
    with pytest.raises(QuantizationError, match="of a weight that has 8"):
        quantize(weight(8), FORMATS["int8"]).cut((start, stop))


def test_only_weights_of_one_kind_are_joined():
    q = quantize(weight(8), FORMATS["int8"])
    for other in (
        quantize(weight(8), FORMATS["fp8"]),
        quantize(weight(8), get_format("int8", 63)),
        quantize(weight(8, 128), FORMATS["int8"]),
    ):
        with pytest.raises(QuantizationError, match="one format and width"):
            concatenate([q, other])
    with pytest.raises(QuantizationError, match="no weight to concatenate"):
        concatenate([])


@pytest.mark.parametrize("emulate", [True, False], ids=["emulation", "kernel"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_one_product_for_all_readers_of_an_input_gives_what_each_gives(name, emulate):
    parts, x = [weight(24), weight(8, seed=1)], torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    quantized = [quantize(part, FORMATS[name]) for part in parts]
    together = QuantizedLinear(concatenate(quantized), None, emulate=emulate)(x)
    alone = torch.cat([QuantizedLinear(q, None, emulate=emulate)(x) for q in quantized], dim=1)
    if name == "int8":  # sums of integers are exact
        assert torch.equal(together, alone)
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_weight_that_is_codes_already_is_refused(dtype):
    with pytest.raises(QuantizationError, match=f"holds codes already, of {dtype}"):
        quantize(torch.ones(4, 256).to(dtype), FORMATS["int8"])


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4,), (2, 2, 2)])
def test_what_is_no_matrix_is_refused(shape):
    with pytest.raises(QuantizationError, match="expected a weight"):
        quantize(torch.ones(shape), FORMATS["int8"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_quantized_as_their_values_in_float32(dtype):
    w = weight(8).to(dtype)
    assert same(quantize(w, FORMATS["int8"]), quantize(w.float(), FORMATS["int8"]))


def test_rows_too_small_for_a_scale_become_zeros():
    w = weight(4)
    w[2] = 1e-45
    w[3, 1:] = 0
    q = quantize(w, FORMATS["int8"])
    assert (q.codes[2] == 0).all()
    assert torch.isfinite(dequantize(q)).all()
