"""Formats with blocks of columns: codes, scales and values against plain Python, and against code of other origin."""

import itertools
import math
import struct
from bisect import bisect_right
from dataclasses import replace

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import quant_scheme
from compressed_tensors.quantization.lifecycle.forward import quantize as their_codes
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp, generate_gparam
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

from benchmarks.quantizers import squared_error
from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.quantize import dequantize, dequantize_rows, quantize, quantize_rows
from tests.quant.grid import E4M3

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NAMES = ("int4", "nvfp4", "mxfp4", "mxfp8")
SCHEMES = {"nvfp4": quant_scheme.NVFP4A16, "mxfp4": quant_scheme.MXFP4A16, "mxfp8": quant_scheme.MXFP8A16}
GROUPS = {"int4": 128, "nvfp4": 16, "mxfp4": 32, "mxfp8": 32}


def single(x: float) -> float:
    """A float rounded to 32 bits. A quotient or product of two of these is rounded once, as 53 > 2 · 24."""
    return struct.unpack("f", struct.pack("f", x))[0]


def nearest(x: float, grid: list[float]) -> int:
    """The index of the value nearest to |x|, ties to the even one, the last one for all that is beyond."""
    ties = [(low + high) / 2 for low, high in itertools.pairwise(grid)]
    above = bisect_right(ties, abs(x))
    return above - 1 if above and abs(x) == ties[above - 1] and above % 2 else above


def reference(rows: list[list[float]], name: str) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
    """Codes, steps and values of a matrix, one number after the other."""
    largest = max(abs(x) for row in rows for x in row)
    codes, steps, values = [], [], []
    for row in rows:
        for kept in (codes, steps, values):
            kept.append([])
        for at in range(0, len(row), GROUPS[name]):
            block = row[at : at + GROUPS[name]]
            step = step_of(max(map(abs, block)), largest, name)
            steps[-1].append(step)
            for x in block:
                ratio = single(x / step) if step else math.copysign(0.0, x)
                sign = math.copysign(1, x)
                if name == "int4":
                    code = max(-7, min(7, round(ratio)))
                    codes[-1].append(code + 8)
                    values[-1].append(single(code * step))
                    continue
                grid = E4M3.tolist() if name == "mxfp8" else E2M1
                index = nearest(ratio, grid)
                codes[-1].append(index + (len(grid) + (name == "mxfp8")) * (sign < 0))
                values[-1].append(single(sign * grid[index] * step))
    return codes, steps, values


def step_of(a: float, largest: float, name: str) -> float:
    if name == "int4":
        return single(a / 7) or 1.0
    if name == "nvfp4":
        outer = 2.0 ** max(-127, math.frexp(largest)[1] - 1 - 10) if largest else 2.0**-127
        return single(E4M3[nearest(single(single(a / 6) / outer), E4M3.tolist())] * outer)
    exponent = math.frexp(a)[1] - 1 - {"mxfp4": 2, "mxfp8": 8}[name] if a else -127
    return 2.0 ** max(-127, exponent)


def blocks(name: str, count: int, seed: int, widest: int = 0) -> torch.Tensor:
    """Random blocks, one a row, of magnitudes around 2^±widest."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(count, GROUPS[name], generator=generator)
    return w * 2.0 ** torch.randint(-widest, widest + 1, (count, 1), generator=generator)


def edges(name: str) -> torch.Tensor:
    """Zeros of both signs, ties of every step, powers of two, the largest float, subnormals and mixtures of all."""
    ties = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    special = [0.0, -0.0, *ties, *E2M1, 6.5, 7.0, 7.49, 7.99, 448, 464, 479, 480, 500, 511, 2**-9, 3 * 2**-10, 2**-10]
    special += [1e-45, 2**-126, 2**-127, 3e38, 1 / 3, 127.5]
    width = GROUPS[name]
    rows = [[x] * width for x in special]
    rows += [[x, -6.0, *[0.5 * x] * (width - 2)] for x in special]
    rows += [[(special * width)[i + shift] * 2.0**-shift for i in range(width)] for shift in range(20)]
    return torch.tensor(rows)


def unpacked(codes: torch.Tensor, name: str) -> torch.Tensor:
    return codes if name == "mxfp8" else torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", ["random", "wide", "edges", "small edges", "zeros"])
def test_codes_and_values_are_those_of_plain_python(name, data):
    w = {
        "random": lambda: blocks(name, 2000, 0),
        "wide": lambda: blocks(name, 1000, 1, widest=100),
        "edges": lambda: edges(name),
        "small edges": lambda: edges(name).clamp(-500, 500) * 2.0**-140,
        "zeros": lambda: torch.zeros(2, GROUPS[name]),
    }[data]()
    q = quantize(w, FORMATS[name])
    codes, _, values = reference(w.tolist(), name)
    assert torch.equal(unpacked(q.parts[0], name).int(), torch.tensor(codes, dtype=torch.int32))
    np.testing.assert_array_equal(dequantize(q).numpy(), np.array(values, np.float32))


@pytest.mark.parametrize("name", SCHEMES)
def test_codes_are_those_of_compressed_tensors(name):
    """Its scales are made in another order, with MX in another way: codes are then those of the same scales."""
    w, fmt = blocks(name, 10_000, 2), FORMATS[name]
    w = torch.cat([w, torch.zeros(1, GROUPS[name])])
    q, args = quantize(w, fmt), SCHEMES[name]["weights"]
    scale, amax = q.parts[1], w.abs().amax(dim=1, keepdim=True)
    outer = None
    if name == "nvfp4":
        outer = 1 / q.parts[2][:1, 0]
        assert 1.3 < generate_gparam(w.min(), w.max()) / outer < 2.7  # its own would use all of E4M3's range
        step, _ = calculate_qparams(-amax, amax, args, global_scale=outer)
        assert torch.equal(step[:-1].float(), scale.view(torch.float8_e4m3fn).float()[:-1])  # 1/8 where ours is 0
    else:
        theirs = generate_mx_scales(amax, num_bits=args.num_bits)
        plain = (amax.frexp().mantissa < 0.875) & (amax > 0)  # it takes the next exponent from 1.75 on
        assert torch.equal(theirs[plain], scale.float()[plain])
        assert 0.5 < plain.float().mean() < 1
        step = torch.exp2(scale.float() - 127)
    with torch.compiler.set_stance("force_eager"):
        codes = their_codes(w, step.float(), None, args, global_scale=outer)
    if name == "mxfp8":
        codes = codes.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = pack_fp4_to_uint8(codes)
        assert torch.equal(unpack_fp4_from_uint8(q.parts[0], *w.shape).float() * step_of_parts(q), dequantize(q))
    assert torch.equal(codes, q.parts[0])


def step_of_parts(q) -> torch.Tensor:
    if q.fmt.name == "nvfp4":
        return q.parts[1].view(torch.float8_e4m3fn).float() * q.parts[2]
    return torch.exp2(q.parts[1].float() - 127)


def unrounded(block: list[float], name: str) -> list[float]:
    """Values of a block whose step is its maximum over the largest code."""
    step, grid = single(max(map(abs, block)) / {"mxfp8": 448}.get(name, 6)), E4M3.tolist() if name == "mxfp8" else E2M1
    return [single(math.copysign(grid[nearest(single(x / step), grid)], x) * step) for x in block]


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_a_squared_error_is_the_sum_of_its_parts(name):
    w = blocks(name, 500, 11)
    rows = [(x, v, u) for row, _, values in zip(w.tolist(), *reference(w.tolist(), name)[1:], strict=True)
            for x, v, u in zip(row, values, unrounded(row, name), strict=True)]  # fmt: skip
    found = squared_error(w, FORMATS[name])
    assert found.dead_zone == pytest.approx(math.fsum(x * x for x, _, u in rows if u == 0))
    assert found.grid_noise == pytest.approx(math.fsum((u - x) ** 2 for x, _, u in rows if u != 0))
    total = math.fsum((v - x) ** 2 for x, v, _ in rows)
    assert found.scale_bias + found.dead_zone + found.grid_noise == pytest.approx(total)
    assert 0 < found.scale_bias < total


def test_the_parts_of_an_error_by_hand():
    w = torch.zeros(1, 32)
    w[0, :3] = torch.tensor([7.5, 0.3, 2.2])  # 6, 0.5, 2 with a step of 1; with 1.25: 7.5, 0, 2.5
    found = squared_error(w, FORMATS["mxfp4"])
    assert (found.dead_zone, found.grid_noise) == pytest.approx((0.3**2, 0.3**2))
    assert found.scale_bias == pytest.approx(1.5**2 + 0.2**2 + 0.2**2 - 2 * 0.3**2)


W4A4 = FORMATS["nvfp4_w4a4"]


@pytest.mark.parametrize("data", ["random", "wide", "edges", "small edges", "zeros"])
def test_activations_in_nvfp4_are_those_of_plain_python_for_each_token_by_itself(data):
    x = {
        "random": lambda: blocks("nvfp4", 2000, 7),
        "wide": lambda: blocks("nvfp4", 2000, 8, widest=20),
        "edges": lambda: edges("nvfp4")[:-1],
        "small edges": lambda: edges("nvfp4")[:-1].clamp(-500, 500) * 2.0**-140,
        "zeros": lambda: torch.zeros(8, 16),
    }[data]()
    x = x[: len(x) // 8 * 8].view(-1, 128)
    found = quantize_rows(x, W4A4)
    for row, *parts in zip(x, *found, dequantize_rows(found, W4A4), strict=True):
        codes, steps, values = (torch.tensor(part[0]) for part in reference([row.tolist()], "nvfp4"))
        assert torch.equal(unpacked(parts[0][None], "nvfp4")[0].int(), codes.int())
        assert torch.equal(parts[1].view(torch.float8_e4m3fn).float() * parts[2], steps.float())
        assert torch.equal(parts[3], values.float())


def test_activations_in_nvfp4_are_those_of_compressed_tensors():
    x, args = blocks("nvfp4", 10_000, 9, widest=3).view(50, -1), quant_scheme.NVFP4["input_activations"]
    codes, scales, outer = quantize_rows(x, W4A4)
    for row, *parts in zip(x, codes, scales, 1 / outer, strict=True):
        step, _ = compute_dynamic_scales_and_zp(row[None], args, torch.nn.Module(), global_scale=parts[2])
        assert torch.equal(step.float()[0], parts[1].view(torch.float8_e4m3fn).float())
        with torch.compiler.set_stance("force_eager"):
            theirs = their_codes(row[None], step.float(), None, args, global_scale=parts[2])
        assert torch.equal(pack_fp4_to_uint8(theirs)[0], parts[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_activation_in_nvfp4_that_is_not_finite_shows_in_its_token_alone(bad):
    x = blocks("nvfp4", 40, 10).view(5, -1)
    expected = dequantize_rows(quantize_rows(x, W4A4), W4A4)
    x[2, 100] = bad
    found = dequantize_rows(quantize_rows(x, W4A4), W4A4)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_codes_and_scales_are_those_of_torchao(name):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    w = torch.cat([blocks(name, 10_000, 3), blocks(name, 1000, 4, widest=100), edges(name)])
    q = quantize(w, FORMATS[name])
    kind = torch.float4_e2m1fn_x2 if name == "mxfp4" else torch.float8_e4m3fn
    scale, codes = mx.to_mx(w, kind, 32, mx.ScaleCalculationMode.FLOOR)
    assert torch.equal(scale.view(torch.uint8), q.parts[1])
    least = (q.parts[1] == 0).squeeze(1)  # its codes are those of 2^-126 there, though the byte is 2^-127
    assert torch.equal(codes.view(torch.uint8)[~least], q.parts[0][~least])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_or_show(name, bad):
    w = blocks(name, 4, 5)
    w[1, 2] = bad
    with pytest.raises(QuantizationError, match=f"{name}: weight has nan or inf"):
        quantize(w, FORMATS[name])
    unseen = dequantize(quantize(w, FORMATS[name], finite=True))  # on a GPU nothing waits for a look
    assert not unseen[1].isfinite().any()  # the block that shares its scale
    if not FORMATS[name].whole:
        assert torch.equal(unseen[2], dequantize(quantize(w[2:3], FORMATS[name]))[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_smaller_largest_code_bounds_all_codes(name):
    fmt = replace(FORMATS[name], weight_max=1)
    q = quantize(blocks(name, 200, 6), fmt)
    one = replace(q, more=tuple(torch.ones_like(part) for part in q.more))
    one.parts[1].fill_({"nvfp4": 0x38}.get(name, 127)) if name != "int4" else one.parts[1].fill_(1)
    assert dequantize(one).abs().max() == 1
