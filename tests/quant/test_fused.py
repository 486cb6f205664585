"""Quantizers in one pass: their bits are those of the definitions, in Triton's interpreter. On a GPU:
tests/gpu/test_kernels.py."""

import importlib.util
from collections.abc import Iterable

import pytest
import torch

from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.quantize import QTensor, dequantize_rows, filled, quantize, quantize_rows
from qurl_ray.quant.training import across_tokens
from tests.quant.interpreted import interpreted

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton: the extra cpu brings it")

QUICK = ("odd", "one", "tiny", "nan")


def matrices() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    new = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    made = {"squares": new(256, 256), "ragged": new(130, 384), "odd": new(37, 100), "one": new(1, 128)}
    made["transposed"] = new(256, 129).t()
    made["zeros"] = new(140, 256)
    made["zeros"][3] = made["zeros"][:, 128:] = made["zeros"][:, 7] = 0
    made["tiny"] = new(130, 128) * 1e-39
    made["ties"] = (torch.arange(130 * 256).view(130, 256) % 255 - 127) / 2  # between two codes of int8
    made["ties"][:, 0] = 127
    for bad in ("nan", "inf", "-inf"):
        made[bad] = new(130, 256)
        made[bad][5, 200] = float(bad)
    return made


def cases(names: Iterable[str]) -> list:
    """Matrices by name; the interpreter takes long for the large ones."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def quantized(request, tmp_path_factory):
    """(matrices, found) by name, of those that tests of this session ask for."""
    asked = {item.callspec.params["matrix"] for item in request.session.items if "quantized" in item.fixturenames}
    made = {name: matrix for name, matrix in matrices().items() if name in asked}
    return made, interpreted(made, tmp_path_factory.mktemp("interpreted"))


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that bits are equal. A nan is one whatever its bits, and no integer shows it."""
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def same_rows(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    same(found[1], expected[1])
    whole = torch.isfinite(expected[1]).all(dim=1)  # integers of other rows mean nothing
    same(found[0][whole], expected[0][whole])
    if found[0].dtype.is_floating_point:
        same(found[0], expected[0])


@pytest.mark.parametrize("matrix", cases(matrices()))
def test_codes_of_activations_are_the_definitions(quantized, matrix):
    x, found = (part[matrix] for part in quantized)
    for name, fmt in FORMATS.items():
        if ("rows", name) in found:
            same_rows(found["rows", name], quantize_rows(filled(x, 0, 0, 0, 3), fmt))
            assert found["rows", name][0].dtype == fmt.dtype


@pytest.mark.parametrize("matrix", cases(name for name, x in matrices().items() if x.shape[1] % 128 == 0))
def test_codes_of_columns_are_the_definitions(quantized, matrix):
    (x, found), fmt = (part[matrix] for part in quantized), FORMATS["fp8_block"]
    codes, amax = quantize_rows(x, fmt)
    for key, values in (("columns", x), ("columns of codes", dequantize_rows((codes, amax), fmt))):
        expected, maxima = across_tokens(values, fmt)
        same_rows(found[key, "fp8_block"], (filled(expected, 0, -len(x) % 128), maxima))


@pytest.mark.parametrize("matrix", cases(matrices()))
@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.codec is None])
def test_codes_of_weights_are_the_definitions(quantized, matrix, name):
    (w, found), fmt = (part[matrix] for part in quantized), FORMATS[name]
    if ("blocks", name) not in found:
        pytest.skip("the format has no such width")
    codes, scale = found["blocks", name]
    expected = quantize(w, fmt, finite=True)
    same(scale, expected.scale)
    if fmt.dtype.is_floating_point or torch.isfinite(scale).all():
        same(codes, expected.codes)
    assert isinstance(QTensor(codes=codes, scale=scale, fmt=fmt).shape, torch.Size)


@pytest.mark.parametrize("matrix", cases(["squares", "odd", "one", "transposed"]))
@pytest.mark.parametrize("biased", [True, False])
def test_scaled_sums_are_the_definitions(quantized, matrix, biased):
    x, found = (part[matrix] for part in quantized)
    sums = (1000 * x).to(torch.int32).float()
    expected = sums * (x.abs().amax(dim=0) * 1e-3) * x.abs().amax(dim=1, keepdim=True)
    same(found["scaled", biased], expected + x[0] if biased else expected)


@pytest.mark.parametrize("matrix", cases(matrices()))
def test_codes_are_transposed(quantized, matrix):
    x, found = (part[matrix] for part in quantized)
    assert torch.equal(found["transposed", None], x.to(torch.int8).t())


# --- for Hopper -------------------------------------------------------------------------------------------------------

E4M3, FLOAT, INT = "*fp8e4nv", "*fp32", "*i32"
COUNTS = ("lines", "count", "groups", "width", "M", "N", "K", "row_stride", "group_stride")
SQUARE = {"ROWS": 128, "WIDTH": 128}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    [
        (
            "_rows",
            {"x": "*bf16", "codes": E4M3, "amax": FLOAT},
            {"MAX": 448, "INTEGERS": False, "LINES": 32, "WIDTH": 128},
        ),
        (
            "_rows",
            {"x": FLOAT, "codes": "*i8", "amax": FLOAT},
            {"MAX": 127, "INTEGERS": True, "LINES": 2, "WIDTH": 2048},
        ),
        (
            "_columns",
            {"x": "*bf16", "codes": E4M3, "amax": FLOAT},
            {"row_amax": None, "MAX": 448, "SCALED": False, "SIDE": 128},
        ),
        (
            "_columns",
            {"x": E4M3, "row_amax": FLOAT, "codes": E4M3, "amax": FLOAT},
            {"MAX": 448, "SCALED": True, "SIDE": 128},
        ),
        ("_blocks", {"w": FLOAT, "codes": E4M3, "scale": FLOAT}, {"MAX": 448, "INTEGERS": False} | SQUARE),
        (
            "_blocks",
            {"w": "*bf16", "codes": "*i8", "scale": FLOAT},
            {"MAX": 127, "INTEGERS": True, "ROWS": 1, "WIDTH": 4096},
        ),
        ("_transposed", {"values": "*u8", "transposed": "*u8"}, {"SIDE": 128}),
        (
            "_scaled",
            {"sums": INT, "scale": FLOAT, "amax": FLOAT, "bias": FLOAT, "y": "*bf16"},
            {"BIASED": True, "WIDTH": 1024},
        ),
        (
            "_scaled",
            {"sums": FLOAT, "scale": FLOAT, "amax": FLOAT, "y": FLOAT},
            {"bias": None, "BIASED": False, "WIDTH": 64},
        ),
    ],
)
def test_it_compiles_for_hopper_and_rounds_as_the_definition(monkeypatch, tmp_path, kernel, types, constants):
    """The interpreter takes what the compiler refuses. Whether the code is right, a GPU has to say."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qurl_ray.quant import fused

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = getattr(fused, kernel)
    known = types | dict.fromkeys(COUNTS, "i32") | {"step": "fp32"}
    signature = {name: "constexpr" if name in constants else known[name] for name in source.arg_names}
    places = {(source.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": 8, "enable_fp_fusion": False}
    made = triton.compile(ASTSource(source, signature, constexprs=places), GPUTarget("cuda", 90, 32), options)
    code = made.asm["ptx"]
    assert ("div.rn.f32" in code) == (kernel in ("_rows", "_columns", "_blocks"))
    assert "div.full" not in code
    assert ("cvt.rn.satfinite.e4m3x2" in code) == (types.get("codes") == E4M3)
    assert ("fma.rn" in code) == (kernel == "_rows" and constants["INTEGERS"])
    assert ("max.NaN.f32" in code) == (kernel in ("_rows", "_columns", "_blocks"))
