"""The kernels for CUDA on a GPU, against the definition.

python -m pytest -m gpu tests/gpu
"""

import pytest
import torch

from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.kernels import why_emulated
from qurl_ray.quant.linear import QuantizedLinear, reference_linear
from qurl_ray.quant.quantize import dequantize_rows, filled, quantize, quantize_rows, row_codes
from qurl_ray.quant.training import PRODUCTS, across_tokens, transposed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WITH_KERNEL = ("int8", "fp8", "fp8_block")


def layer(name: str, rows: int = 256, columns: int = 640, **options) -> QuantizedLinear:
    """A linear with random codes on the GPU; skips where it has no kernel."""
    reason = why_emulated(FORMATS[name], torch.device("cuda"), (rows, columns))
    if reason and not options:
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(0)
    w, bias = (torch.randn(*shape, generator=generator) * 0.05 for shape in ((rows, columns), (rows,)))
    return QuantizedLinear(quantize(w.cuda(), FORMATS[name]), bias.cuda(), **options)


def inputs(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))).to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 16, 17, 33, 512])
@pytest.mark.parametrize("name", WITH_KERNEL)
def test_the_kernel_computes_the_definition(name, count, dtype):
    linear, x = layer(name), inputs(count, 640, dtype)
    assert linear.kernel is not None
    found, expected = linear(x), reference_linear(x.float(), linear.resident(), linear.bias)
    assert found.dtype == dtype
    precision = 2**-7 if dtype == torch.bfloat16 else 1e-3 if name.startswith("fp8") else 1e-6
    torch.testing.assert_close(found.float(), expected, rtol=precision, atol=precision * float(expected.abs().max()))


@pytest.mark.parametrize("columns", [640, 4096])
def test_int8_does_not_depend_on_the_batch(columns):
    linear, x = layer("int8", columns=columns), inputs(512, columns, torch.float32)
    assert torch.equal(linear(x)[100:101], linear(x[100:101]))


def test_int8_on_a_gpu_equals_int8_on_a_cpu_up_to_rounding():
    linear, x = layer("int8"), inputs(40, 640, torch.float32)
    expected = reference_linear(x.cpu(), linear.resident().to("cpu"), linear.bias.cpu())
    torch.testing.assert_close(linear(x).cpu(), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("name", FORMATS)
def test_emulation_computes_the_same_as_on_a_cpu(name):
    linear, x = layer(name, emulate=True), inputs(40, 640, torch.float32)
    assert linear.kernel is None
    expected = reference_linear(x.cpu(), linear.resident().to("cpu"), linear.bias.cpu())
    torch.testing.assert_close(linear(x).cpu(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", WITH_KERNEL)
def test_codes_are_quantized_and_kept_as_on_a_cpu(name):
    w = torch.randn(256, 640, generator=torch.Generator().manual_seed(0)) * 0.05
    sent = quantize(w, FORMATS[name])
    resident = layer(name).resident()
    assert fingerprint(resident.codes, resident.scale) == fingerprint(sent.codes, sent.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 300, 1024])
def test_gradients_are_near_those_of_emulation(tokens, dtype):
    fmt, entry = FORMATS["fp8_block"], PRODUCTS["scaled_mm"]
    if reason := entry.objection(fmt, torch.device("cuda"), (tokens, 256, 640)):
        pytest.skip(reason)
    dy, w = 1e-3 * inputs(tokens, 256, dtype), 0.05 * inputs(256, 640, torch.float32)
    codes, amax = quantize_rows(inputs(tokens, 640, torch.float32), fmt)
    operands = dy, quantize(w, fmt), (codes.to(fmt.dtype), amax), fmt
    for found, expected in zip(entry.gradients(*operands), PRODUCTS["emulation"].gradients(*operands), strict=True):
        assert found.dtype == expected.dtype
        assert (found - expected).norm() < (1e-3 if dtype == torch.float32 else 5e-3) * expected.norm()
    dy[0, 7] = torch.nan
    dx, dw = entry.gradients(*operands)
    assert not torch.isfinite(dx[0]).any()
    assert not torch.isfinite(dw[7]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [640, 20480])
@pytest.mark.parametrize("name", WITH_KERNEL)
def test_activations_get_the_codes_that_they_get_on_a_cpu(name, columns, dtype):
    fmt, x = FORMATS[name], inputs(512, columns, dtype)
    x[3], x[4, 7], x[5, 9] = 0, torch.nan, torch.inf
    expected = quantize_rows(filled(x.cpu().float(), 0, 0, 0, 16), fmt)
    for found in (quantize_rows(filled(x.float(), 0, 0, 0, 16), fmt), row_codes(x, fmt, rows=528)):
        assert same(found[1], expected[1])
        numbers = torch.isfinite(expected[1]).all(dim=1)  # integers of other rows mean nothing
        assert same(found[0][numbers.cuda()], expected[0][numbers])
        assert same(found[0], expected[0]) or name == "int8"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 300, 512])
def test_columns_get_the_codes_that_they_get_on_a_cpu(tokens, dtype):
    from qurl_ray.quant import fused

    fmt, x = FORMATS["fp8_block"], inputs(tokens, 640, dtype)
    x[0, 7] = torch.nan
    codes, amax = row_codes(x, fmt)
    for operands, values in (((x, None), x), ((codes, amax), dequantize_rows((codes, amax), fmt))):
        found, maxima = fused.codes_of_columns(*operands, fmt)
        expected, expected_maxima = across_tokens(values.cpu(), fmt)
        assert same(found[:, :tokens], expected)
        assert same(maxima, expected_maxima)
        finite = torch.isfinite(maxima[:, -1])  # what fills a group that has a nan is nan, too
        assert not found[finite, tokens:].float().any()


@pytest.mark.parametrize("shape", [(128, 256), (200, 24), (3584, 512)])
def test_codes_are_transposed(shape):
    q = quantize(inputs(*shape, torch.float32), FORMATS["fp8_block"])
    found = transposed(q)
    assert torch.equal(found.codes.view(torch.uint8), q.codes.view(torch.uint8).t())
    assert found.codes.is_contiguous()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.equal(found.float().cpu().nan_to_num(0.5), expected.float().nan_to_num(0.5)))
