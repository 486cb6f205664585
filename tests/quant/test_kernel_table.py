"""Which kernel multiplies what, and what each computes: those for CUDA too, as far as a CPU has their operations."""

import os
import subprocess
import sys
import time
import timeit
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.errors import QuantizationError, StaleWeights
from qurl_ray.quant import kernels
from qurl_ray.quant.formats import FORMATS, get_format
from qurl_ray.quant.kernels import IN_PLACE, KERNELS, kernel_for, named_kernel, why_emulated
from qurl_ray.quant.linear import QuantizedLinear, reference_linear, weight_max_code
from qurl_ray.quant.quantize import QTensor, quantize, quantize_rows, quantize_rows_int8

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ON_X86 = "fbgemm" in torch.backends.quantized.supported_engines
HAS_AMX = KERNELS["onednn"].lacks(CPU) is None
TAKEN = get_format("int8", weight_max_code(FORMATS["int8"], CPU))
"""INT8 as this processor's kernel takes it."""


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def inputs(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(1))).to(dtype)


def gpu(monkeypatch, capability: tuple[int, int], cuda: str = "12.9") -> None:
    """Pretend that there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)


# --- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "capability", "shape", "kernel"),
    [
        ("int8", (7, 5), (576, 1536), "int_mm"),
        ("int8", (7, 0), (576, 1536), None),
        ("int8", (9, 0), (576, 1530), None),
        ("int8", (9, 0), (570, 1536), None),
        ("fp8", (8, 9), (576, 1536), "scaled_mm"),
        ("fp8", (8, 6), (576, 1536), None),
        ("fp8", (9, 0), (576, 1528), None),
        ("fp8_block", (9, 0), (256, 1536), "scaled_mm_block"),
        ("fp8_block", (9, 0), (576, 1536), None),
        ("fp8_block", (8, 9), (256, 1536), None),
        ("fp8_block", (10, 0), (256, 1536), None),
        ("int4", (9, 0), (256, 1536), None),
    ],
)
def test_a_gpu_multiplies_the_widths_that_its_operations_take(monkeypatch, name, capability, shape, kernel):
    gpu(monkeypatch, capability)
    found = kernel_for(FORMATS[name], CUDA, shape)
    assert (found and found.name) == kernel
    assert (why_emulated(FORMATS[name], CUDA, shape) is None) == (kernel is not None)


def test_blocks_need_a_cuda_that_has_them(monkeypatch):
    gpu(monkeypatch, (9, 0), cuda="12.8")
    assert why_emulated(FORMATS["fp8_block"], CUDA) == (
        "scaled_mm_block needs a torch for CUDA 12.9 or later, not 12.8"
    )


def test_the_reason_for_emulation_names_what_is_missing(monkeypatch):
    assert why_emulated(FORMATS["fp8"], CPU) == "there is no kernel for fp8 on cpu"
    assert why_emulated(FORMATS["int8"], torch.device("meta")) == "there is no kernel for int8 on meta"
    gpu(monkeypatch, (8, 6))
    assert why_emulated(FORMATS["fp8"], CUDA) == "scaled_mm needs compute capability 8.9 or later, not 8.6"
    assert why_emulated(FORMATS["int8"], CUDA, (576, 1530)) == (
        "int_mm needs widths that are multiples of 8, not 576 × 1530"
    )
    gpu(monkeypatch, (10, 0))
    assert "at most 9.0" in why_emulated(FORMATS["fp8_block"], CUDA)


def test_without_a_gpu_there_is_no_kernel_for_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernel_for(FORMATS["int8"], CUDA) is None
    assert kernel_for(FORMATS["fp8"], CUDA) is None


def test_other_processors_emulate_and_say_so(monkeypatch):
    monkeypatch.setattr(torch.backends, "quantized", SimpleNamespace(supported_engines=["qnnpack"]))
    q = quantize(weight(8, 16), FORMATS["int8"])
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert why_emulated(q.fmt, CPU) == (
        "onednn needs an x86 CPU with AMX and a torch with oneDNN; fbgemm needs an x86 CPU and a torch built with it"
    )
    assert QuantizedLinear(q, None).kernel is None
    assert weight_max_code(q.fmt, CPU) == 127
    with pytest.raises(QuantizationError, match="asked for cannot be used: fbgemm needs an x86 CPU"):
        QuantizedLinear(q, None, kernel="fbgemm")


@pytest.mark.skipif(not ON_X86, reason="fbgemm is for x86")
@pytest.mark.parametrize(("vnni", "top"), [(True, 127), (False, 63)])
def test_weights_lose_a_bit_where_sums_of_16_bits_would_overflow(monkeypatch, vnni, top):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    assert weight_max_code(FORMATS["int8"], CPU) == top
    assert weight_max_code(get_format("int8", 31), CPU) == 31
    assert weight_max_code(FORMATS["fp8"], CPU) == 448
    assert 2 * 255 * 63 < 2**15 <= 2 * 255 * 127  # unsigned activations, pairs of products


def test_kernels_that_cannot_be_used_are_refused_by_name():
    q = quantize(weight(8, 16), FORMATS["int8"])
    with pytest.raises(QuantizationError, match="unknown kernel 'marlin'; known: onednn, fbgemm, int_mm"):
        QuantizedLinear(q, None, kernel="marlin")
    with pytest.raises(QuantizationError, match="int_mm needs a device of type cuda, not cpu"):
        QuantizedLinear(q, None, kernel="int_mm")
    with pytest.raises(QuantizationError, match="scaled_mm does not multiply int8"):
        named_kernel("scaled_mm", q.fmt, CUDA)
    assert QuantizedLinear(q, None, kernel="emulation").kernel is None


@pytest.mark.skipif(not ON_X86, reason="fbgemm is for x86")
def test_a_kernel_can_be_asked_for():
    q = quantize(weight(8, 32), TAKEN)
    assert QuantizedLinear(q, None, kernel="fbgemm").kernel == "fbgemm"
    assert QuantizedLinear(q, None).kernel == ("onednn" if HAS_AMX else "fbgemm")


@pytest.mark.skipif(not ON_X86, reason="fbgemm is for x86")
def test_codes_that_a_kernel_would_saturate_with_are_emulated(monkeypatch):
    """As on processors without VNNI, whose fbgemm adds pairs of products in 16 bits."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    q, x = quantize(weight(8, 32), FORMATS["int8"]), inputs(3, 32)
    linear = QuantizedLinear(q, None)
    assert linear.kernel is None
    assert torch.equal(linear(x), reference_linear(x, q, None))
    with pytest.raises(QuantizationError, match="saturate with weight codes to 127: here it takes them to 63"):
        QuantizedLinear(q, None, kernel="fbgemm")
    assert QuantizedLinear(quantize(weight(8, 32), get_format("int8", 63)), None).kernel == "fbgemm"


def test_a_processor_kept_from_its_amx_uses_the_next_kernel(monkeypatch):
    """Without it the product is right, and a thousand times as slow."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for allowed, name in (("AVX512_CORE_VNNI", "fbgemm"), ("avx512_core_amx", "onednn"), ("DEFAULT", "onednn")):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", allowed)
        assert kernel_for(FORMATS["int8"], CPU).name == name
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with pytest.raises(QuantizationError, match="onednn needs AMX, which ONEDNN_MAX_CPU_ISA=AVX2 leaves out"):
        named_kernel("onednn", FORMATS["int8"], CPU)


# --- what they compute ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emulate", [True, False], ids=["emulation", "kernel"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_bfloat16_is_computed_in_float32_and_rounded_once(fmt, emulate):
    q, bias, x = quantize(weight(24, 256), fmt), weight(1, 24)[0], inputs(2, 5, 256, dtype=torch.bfloat16)
    found = QuantizedLinear(q, bias, emulate=emulate)(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, QuantizedLinear(q, bias, emulate=emulate)(x.float()).bfloat16())


def int8_by_integers(x: np.ndarray, q: QTensor, bias: np.ndarray) -> np.ndarray:
    """Codes of both sides, products in int64, scales in float64."""
    top = np.abs(x).max(axis=-1, keepdims=True)
    codes = np.rint((x / top).astype(np.float64) * 127).astype(np.int64)
    return codes @ q.codes.long().numpy().T * q.scale[:, 0].double().numpy() * top.astype(np.float64) / 127 + bias


@pytest.mark.parametrize("name", ["int_mm", "onednn"])
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 100])
@pytest.mark.parametrize("columns", [64, 1024, 4096])
def test_integers_are_summed_exactly(name, rows, columns):
    if name == "onednn" and not torch.cpu._is_vnni_supported():
        pytest.skip("without VNNI, oneDNN adds pairs of products in 16 bits; the kernel is used with AMX only")
    kernel, q = KERNELS[name], quantize(weight(24, columns), FORMATS["int8"])
    x, bias = inputs(rows, columns), weight(1, 24)[0]
    found = kernel.forward(x, kernel.pack(q), bias)
    expected = int8_by_integers(x.numpy(), q, bias.numpy())
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    # The definition is exact, too, up to so many columns. Without AMX oneDNN takes a plain loop that scales otherwise.
    if columns <= 2**24 // 127**2 and (name != "onednn" or HAS_AMX):
        assert torch.equal(found, reference_linear(x, q, bias))
    assert torch.equal(found[:1], kernel.forward(x[:1], kernel.pack(q), bias))


@pytest.mark.parametrize("shape", [(1, 64), (3, 7, 576), (40, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_mm_computes_the_definition(shape, dtype):
    kernel, q = KERNELS["scaled_mm"], quantize(weight(48, shape[-1]), FORMATS["fp8"])
    x, bias = inputs(*shape, dtype=dtype), weight(1, 48)[0].to(dtype).float()
    found = kernel.forward(x, kernel.pack(q), bias)
    expected = reference_linear(x.float(), q, bias)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    precision = 1e-5 if dtype == torch.float32 else 2**-7  # two roundings to bfloat16: of the product, of the sum
    torch.testing.assert_close(found.float(), expected, rtol=precision, atol=precision * float(expected.abs().max()))


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    outputs=st.integers(1, 70),
    top=st.sampled_from([127, 63]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_kernels_of_this_processor_agree_on_every_bit(rows, columns, outputs, top, seed):
    """At ±63, which fbgemm multiplies everywhere."""
    generator = torch.Generator().manual_seed(seed)
    q = quantize(torch.randn(outputs, columns, generator=generator), get_format("int8", top))
    x = torch.randn(rows, columns, generator=generator)
    x[0] = 0
    expected = reference_linear(x, q, None)
    for kernel in (*KERNELS.values(), IN_PLACE):
        if kernel.supports(q.fmt, CPU, tuple(q.shape)) and kernel.weight_max(q.fmt) >= top:
            packed = kernel.pack(q)
            found = kernel.unpack(packed)
            assert torch.equal(kernel.forward(x, packed, None), expected), kernel.name
            assert torch.equal(found.codes, q.codes)
            assert torch.equal(found.scale, q.scale)


NEEDS_IN_PLACE = pytest.mark.skipif(
    not (ON_X86 and IN_PLACE.supports(TAKEN, CPU)), reason="needs fbgemm, and an exact and fast torch._int_mm"
)


@NEEDS_IN_PLACE
@pytest.mark.parametrize("shape", [(18, 256), (96, 2500), (2, 2), (577, 33)])
def test_packing_changes_no_bit_of_a_result(shape):
    """At any width, and with what a rank of 16-bit sums would saturate."""
    torch.manual_seed(0)
    q = quantize(torch.randn(shape), TAKEN)
    q.codes[0] = q.fmt.weight_max
    one = QuantizedLinear(q, torch.randn(shape[0]))
    assert one._kernel is IN_PLACE
    xs = [torch.cat((torch.ones(1, shape[1]), torch.randn(rows, shape[1]))) for rows in (0, 1, 8, 40, 130)]
    xs.append(torch.zeros(0, shape[1]))
    before = [one(x) for x in xs]
    held = one.resident()
    one.pack()
    assert one._kernel.name == one.kernel
    assert all(torch.equal(one(x), y) for x, y in zip(xs, before, strict=True))
    assert torch.equal(one.resident().codes, held.codes)
    one.pack()  # again: nothing happens


@NEEDS_IN_PLACE
@pytest.mark.parametrize("fault", ["other codes", "other products"])
def test_a_weight_that_packing_changes_is_an_error(monkeypatch, fault):
    one = QuantizedLinear(quantize(torch.randn(8, 16), TAKEN), None)
    faster = type(one._fastest)
    unpack, forward = faster.unpack, faster.forward
    if fault == "other codes":
        damaged = lambda self, packed: replace(unpack(self, packed), codes=unpack(self, packed).codes + 1)  # noqa: E731
        monkeypatch.setattr(faster, "unpack", damaged)
    else:
        monkeypatch.setattr(faster, "forward", lambda *arguments: 1.5 * forward(*arguments))
    with pytest.raises(StaleWeights, match=r"codes of \(8, 16\) are others, or give other products"):
        one.pack()
    assert one._kernel is IN_PLACE


def test_a_product_that_saturates_is_not_used(monkeypatch):
    """As on processors that add pairs of products in 16 bits."""
    exact = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: exact(a, b).clamp(-(2**15), 2**15 - 1))
    monkeypatch.setattr(kernels, "_int_mm_is_fast", lambda: True)
    kernels._int_mm_is_exact.cache_clear()
    try:
        assert "exactly" in IN_PLACE.objection(FORMATS["int8"], CPU)
        assert IN_PLACE.supports(get_format("int8", 2), CPU), "96 products of 127 · 2 fit into 16 bits"
        if ON_X86:
            assert QuantizedLinear(quantize(torch.randn(8, 16), FORMATS["int8"]), None)._kernel is not IN_PLACE
    finally:
        kernels._int_mm_is_exact.cache_clear()


def test_a_product_that_is_a_plain_loop_is_not_used(monkeypatch):
    """As in oneDNN without VNNI."""
    fast = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: time.sleep(0.01) or fast(a, b))
    kernels._int_mm_is_fast.cache_clear()
    try:
        assert "fast" in IN_PLACE.objection(TAKEN, CPU)
    finally:
        kernels._int_mm_is_fast.cache_clear()


@pytest.mark.skipif(not ON_X86, reason="needs a kernel")
def test_a_linear_is_fast_from_its_first_product():
    """Before it is packed, too: 1.1 times as long as afterwards on an AMD Zen 5, 44 times by a plain loop."""
    linear, x = QuantizedLinear(quantize(torch.randn(1536, 576), TAKEN), None), torch.randn(32, 576)
    seconds = lambda: min(timeit.repeat(lambda: linear(x), number=1, repeat=9))  # noqa: E731
    first = seconds()
    linear.pack()
    assert first < 12 * seconds()


SMALL_PRODUCTS = """
import torch
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.kernels import KERNELS
from qurl_ray.quant.linear import reference_linear
from qurl_ray.quant.quantize import quantize

kernel = KERNELS["onednn"]
for outputs in (1, 7, 8, 24, 64, 128, 129, 256, 257, 512):
    for columns in (17, 64, 255, 256, 257):
        q = quantize(torch.randn(outputs, columns), FORMATS["int8"])
        packed, x = kernel.pack(q), torch.randn(40, columns)
        expected = reference_linear(x, q, None)
        for rows in (1, 2, 4, 10, 32, 33, 40):
            assert torch.equal(kernel.forward(x[:rows], packed, None), expected[:rows]), (rows, outputs, columns)
"""


@pytest.mark.skipif(not HAS_AMX, reason="needs AMX")
@pytest.mark.parametrize("isa", ["AVX10_1_512_AMX", "ALL"])
def test_small_products_have_the_bits_of_large_ones(isa):
    """With AMX's float16, where there is one, and without, as on Sapphire Rapids: oneDNN reads its limit once."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "ONEDNN_VERBOSE": "1"}
    done = subprocess.run([sys.executable, "-c", SMALL_PRODUCTS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "amx" in done.stdout
    assert "ref_int8" not in done.stdout


@pytest.mark.skipif(not ON_X86, reason="fbgemm is for x86")
def test_rows_that_are_too_short_for_onednn_are_left_to_fbgemm(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert kernel_for(FORMATS["int8"], CPU, (64, 17)).name == "onednn"
    assert kernel_for(TAKEN, CPU, (64, 16)).name == "fbgemm"
    with pytest.raises(QuantizationError, match="onednn needs rows of more than 16, not 16"):
        named_kernel("onednn", FORMATS["int8"], CPU, (64, 16))


@settings(deadline=None)
@given(values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=300), seed=st.integers(0, 1000))
def test_int8_rows_are_rounded_as_rows_of_any_format(values, seed):
    x = torch.tensor([values, values[::-1]])
    x[1] *= torch.randint(-127, 128, x[1].shape, generator=torch.Generator().manual_seed(seed)) / 127  # near ties
    codes, amax = quantize_rows_int8(x, FORMATS["int8"])
    expected = quantize_rows(x, FORMATS["int8"])
    assert torch.equal(codes.float(), expected[0])
    assert torch.equal(amax, expected[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_no_kernel_makes_numbers_of_what_is_not_one(bad):
    q, x = quantize(weight(24, 64), FORMATS["int8"]), inputs(3, 64)
    x[1, 5] = bad
    for kernel in KERNELS.values():
        if kernel.supports(q.fmt, CPU):
            found = kernel.forward(x, kernel.pack(q), None)
            assert not torch.isfinite(found[1]).any(), kernel.name
            assert torch.isfinite(found[[0, 2]]).all()


def block_product(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype) -> torch.Tensor:
    """What torch documents of scaled_mm for 1 × 128 by 128 × 128, which no CPU has, with its demands on the layout."""
    kinds = torch.nn.functional.ScalingType
    assert (recipe_a, recipe_b) == (kinds.BlockWise1x128, kinds.BlockWise128x128)
    M, N, blocks = len(a), b.shape[1], a.shape[1] // 128
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert scale_a.shape == (M, blocks)
    assert scale_a.stride(0) == 1
    assert scale_a.stride(1) == M or blocks == 1
    filled = -(-blocks // 4) * 4
    assert scale_b.shape == (filled, N // 128)
    assert scale_b.stride() == (1, filled)
    out = torch.zeros(M, N, dtype=torch.float64)
    for k in range(blocks):
        part = slice(128 * k, 128 * (k + 1))
        product = a[:, part].double() @ b[part].double()
        out += product * scale_a[:, k, None].double() * scale_b[k].double().repeat_interleave(128)
    return out.to(output_dtype)


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 384), (128, 640)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_reach_scaled_mm_as_it_wants_them(monkeypatch, rows, columns, dtype):
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", block_product)
    kernel, q = KERNELS["scaled_mm_block"], quantize(weight(rows, columns), FORMATS["fp8_block"])
    x, bias = inputs(5, 7, columns, dtype=dtype), weight(1, rows)[0]
    found = kernel.forward(x, kernel.pack(q), bias)
    assert found.dtype == dtype
    precision = 1e-5 if dtype == torch.float32 else 2**-7
    expected = reference_linear(x.float(), q, bias)
    torch.testing.assert_close(found.float(), expected, rtol=precision, atol=precision * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("kernel", "name"), [("int_mm", "int8"), ("scaled_mm", "fp8"), ("scaled_mm_block", "fp8_block")]
)
def test_packed_codes_can_be_read_back(kernel, name):
    q = quantize(weight(256, 384), FORMATS[name])
    found = KERNELS[kernel].unpack(KERNELS[kernel].pack(q))
    assert torch.equal(found.codes.view(torch.uint8), q.codes.view(torch.uint8))
    assert torch.equal(found.scale, q.scale)
    assert found.fmt == q.fmt
