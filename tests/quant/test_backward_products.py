"""The products of a backward pass in FP8 blocks: which entry is used, that nothing waits for a GPU, what torchao's
quantizers compute. No GPU is needed: operations run on tensors without data, Triton's kernels in its interpreter."""

import importlib.util
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qurl_ray.quant import training, unified
from qurl_ray.quant.equalize import Factors
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.kernels import KERNELS
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.training import announced, products_for
from tests.quant.grid import E4M3
from tests.quant.test_kernel_table import CPU, CUDA, gpu
from tests.quant.test_unified import BLOCK, MODES, error, gradients, problem, products, rounded

BF16 = torch.bfloat16
FOLDER = Path(sys.prefix, "torchao")
"""Where `make test` puts torchao, so that other processes do not import it."""
NEEDS_TORCHAO = pytest.mark.skipif(
    not importlib.util.find_spec("triton") or not (FOLDER.is_dir() or importlib.util.find_spec("torchao")),
    reason="needs torchao, which `make test` installs, and Triton, which the extra cpu brings",
)

# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "shape", "dtype", "name"),
    [
        ((9, 0), (300, 256, 640), BF16, "torchao"),
        ((9, 0), (300, 256, 640), torch.float32, "torchao"),
        ((9, 0), (300, 256, 640), torch.float16, "scaled_mm"),
        ((9, 0), (2**31 // 640 + 1, 256, 640), BF16, "scaled_mm"),
        ((9, 0), (300, 576, 640), BF16, "emulation"),
        ((9, 0), (300, 256, 576), BF16, "emulation"),
        ((8, 9), (300, 256, 640), BF16, "emulation"),
        ((10, 0), (300, 256, 640), BF16, "emulation"),
    ],
)
def test_the_first_that_fits_is_used(monkeypatch, capability, shape, dtype, name):
    gpu(monkeypatch, capability)
    monkeypatch.setattr(training, "_torchao", lambda: SimpleNamespace())
    assert products_for(BLOCK, CUDA, shape, dtype).name == name
    assert products_for(BLOCK, CPU, shape, dtype).name == "emulation"
    assert products_for(FORMATS["fp8"], CUDA, shape, dtype).name == "emulation"


def test_what_is_not_used_is_announced_with_the_reason(monkeypatch):
    assert announced(BLOCK, CPU) == "emulation: scaled_mm_block needs a device of type cuda, not cpu"
    gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(training, "_torchao", lambda: None)
    assert announced(BLOCK, CUDA) == ("scaled_mm: torchao needs torchao 0.18 and Triton (pip install 'qurl-ray[gpu]')")
    monkeypatch.setattr(training, "_torchao", lambda: SimpleNamespace())
    assert announced(BLOCK, CUDA) == "torchao"
    gpu(monkeypatch, (9, 0), cuda="12.8")
    assert announced(BLOCK, CUDA) == "emulation: scaled_mm_block needs a torch for CUDA 12.9 or later, not 12.8"


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_a_torchao_that_is_missing_or_another_one_is_not_used(monkeypatch, module):
    name = "torchao.prototype.blockwise_fp8_training.kernels"
    monkeypatch.setitem(sys.modules, name, module)
    training._torchao.cache_clear()
    try:
        assert training._torchao() is None
    finally:
        training._torchao.cache_clear()


# --- without data: what waits for a value raises ----------------------------------------------------------------------

M, N, K = 1000, 512, 384
WHOLE = 1024


class Recorder(TorchDispatchMode):
    """Records the tensors that operations make, without views and what is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in before:
                self.made.append((func.name().split("::")[1].split(".")[0], t.dtype, t.numel()))
        return out

    def nbytes(self) -> int:
        return sum(dtype.itemsize * count for _, dtype, count in self.made)


def on_no_gpu(how: unified._How, dtype=BF16) -> tuple[Recorder, Recorder]:
    """What forward and backward of a linear make on a GPU, for which the device without data stands.

    Copies from it and looks at its values raise. torch's checks of scaled_mm take it for CUDA."""
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes * (tensor is not weight)
        return tensor

    x, dy = (torch.empty(M, width, device="meta", dtype=dtype) for width in (K, N))
    weight, bias = torch.empty(N, K, device="meta"), torch.empty(N, device="meta")
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Recorder() as forward:
        y = unified._UnifiedLinear.apply(x, weight, bias, None, how)
    with Recorder() as backward:
        gradients = torch.autograd.grad(y, leaves, dy)
    assert (y.dtype, y.shape) == (dtype, (M, N))
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert (gradient.dtype, gradient.shape) == (leaf.dtype, leaf.shape)
    if how.backward == "quantized":
        assert kept == M * K + 4 * M * K // 128
    return forward, backward


def how(name: str = "fp8_block", backward="quantized", emulate=False) -> unified._How:
    return unified._How(fmt=FORMATS[name], backward=backward, factors=Factors(), emulate=emulate)


def use(monkeypatch, name: str) -> None:
    """Pretend to be an H100 on which this entry is the first that fits."""
    gpu(monkeypatch, (9, 0))
    monkeypatch.syspath_prepend(FOLDER)
    training._torchao.cache_clear()
    monkeypatch.setattr(type(KERNELS["scaled_mm_block"]), "device_type", "meta")
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # it does not know that device
    if name != "torchao":
        monkeypatch.setattr(training, "_torchao", lambda: None)


ENTRIES = [pytest.param("torchao", marks=NEEDS_TORCHAO), "scaled_mm", "emulation"]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("name", ENTRIES)
def test_no_product_waits_for_the_gpu_and_cublas_gets_the_layouts_that_it_takes(monkeypatch, name, dtype):
    """torch checks types, shapes and strides of scaled_mm's operands with data or without."""
    use(monkeypatch, name)
    forward, backward = on_no_gpu(how(emulate=name == "emulation"), dtype)
    count = [sum(operation == "_scaled_mm_v2" for operation, *_ in one.made) for one in (forward, backward)]
    assert count == ([0, 0] if name == "emulation" else [1, 2])
    quantizers = [operation for operation, *_ in backward.made if operation.startswith("triton_fp8")]
    each = [f"triton_fp8_blockwise_act_quant_{side}" for side in ("lhs", "transposed_lhs", "rhs")]
    assert quantizers == ([one for one in each for _ in range(2)] if name == "torchao" else [])  # codes and scales


@pytest.mark.parametrize(("name", "backward"), MODES)
def test_no_flow_waits_for_the_gpu(monkeypatch, name, backward):
    use(monkeypatch, "emulation")
    on_no_gpu(how(name, backward, emulate=True))


@pytest.mark.parametrize("emulate", [True, False])
def test_waiting_would_be_noticed(monkeypatch, emulate):
    use(monkeypatch, "scaled_mm")
    with pytest.raises(RuntimeError, match="meta"):
        quantize(torch.empty(N, K, device="meta"), BLOCK)
    one = type(training.PRODUCTS["emulation" if emulate else "scaled_mm"])
    plain = one.gradients
    monkeypatch.setattr(one, "gradients", lambda self, dy, *rest: dy.isfinite().all().item() and plain(self, dy, *rest))
    with pytest.raises(RuntimeError, match="meta"):
        on_no_gpu(how(emulate=emulate))


@NEEDS_TORCHAO
def test_with_torchao_no_operand_is_held_in_float32(monkeypatch):
    use(monkeypatch, "torchao")
    _, fused = on_no_gpu(how())
    use(monkeypatch, "scaled_mm")
    _, plain = on_no_gpu(how())
    assert max(count for _, dtype, count in fused.made if dtype == torch.float32) <= N * K < M * min(N, K)
    assert max(count for _, dtype, count in plain.made if dtype == torch.float32) >= M * N
    # Of dy: the tokens filled up to whole groups, two times codes. Of x: bfloat16, codes. The result dx, filled.
    operands = WHOLE * ((2 + 1 + 1) * N + (2 + 1) * K + 2 * K)
    weight = 5 * 4 * N * K + 3 * N * K  # passes in float32, codes and their transpose; and dW
    assert fused.nbytes() < 1.05 * (operands + weight)
    assert plain.nbytes() > 4 * fused.nbytes()


# --- in Triton's interpreter ------------------------------------------------------------------------------------------


def special(kind: str) -> tuple[torch.Tensor, ...]:
    """x, weight, dy of 300 tokens."""
    x, weight, _, dy = (t.detach().clone() for t in problem(300, 256, 384))
    if kind == "zeros":
        x[140], x[:, 128:256], dy[3], dy[:, 40], weight[128:] = 0, 0, 0, 0, 0
        dy[128:256] = 0
    elif kind == "tiny":  # groups of subnormal numbers, of some whose maximum is below 1e-12, and of both with others
        dy[:128, :128], dy[128:256, :128], dy[256:, :128] = dy[:128, :128] * 1e-38, dy[128:256, :128] * 1e-11, 0
        dy[5, 200] = 1e-42
    elif kind != "plain":
        dy[200, 30] = float(kind.removeprefix("x "))
        if kind.startswith("x "):
            dy[200, 30], x[200, 130] = 1.0, float(kind.removeprefix("x "))
    return x, weight, dy


BAD = ["nan", "inf", "-inf", "x nan", "x inf"]
TOKENS = [1, 127, 128, 129, 300]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """(problems, found) by name."""
    folder = tmp_path_factory.mktemp("interpreted")
    problems = {kind: special(kind) for kind in ("plain", "zeros", "tiny", *BAD)}
    problems["none"] = torch.zeros(0, 640), problems["plain"][1].repeat(1, 5)[:, :640], torch.zeros(0, 256)
    for tokens in TOKENS:
        for dtype in (torch.float32, BF16):
            x, weight, _, dy = (t.detach() for t in problem(tokens, 256, 640, dtype))
            problems[f"{tokens}, {dtype}"] = x, weight, dy
    torch.save(problems, folder / "in.pt")
    command = [sys.executable, Path(__file__).with_name("torchao_interpreted.py"), folder / "in.pt", folder / "out.pt"]
    paths = [str(Path(__file__).parents[2]), str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return problems, torch.load(folder / "out.pt")


def as_torchao(values: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) block by block, in float64 but for the roundings to float32 that torchao's source has."""
    codes, scales = np.zeros(values.shape), np.zeros((-(-values.shape[0] // rows), -(-values.shape[1] // columns)))
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            factor = np.float32(448 / max(float(np.abs(values[at]).max()), float(np.float32(1e-12))))
            scaled = (values[at].astype(np.float32) * factor).astype(np.float64)
            index = np.searchsorted(middles, np.abs(scaled))
            index += (index % 2 == 1) & (np.abs(scaled) == middles[np.minimum(index, len(middles) - 1)])  # ties to even
            codes[at] = np.sign(scaled) * E4M3[index]
            scales[i, j] = np.float32(1) / factor
    return codes, scales


@NEEDS_TORCHAO
@pytest.mark.parametrize("name", ["plain", "zeros", "tiny", "300, torch.bfloat16"])
def test_torchao_rounds_as_its_source_says(interpreted, name):
    problems, found = interpreted
    dy = torch.nn.functional.pad(problems[name][2].float(), (0, 0, 0, -300 % 128)).numpy()
    for side, blocks in {"lhs": (1, 128), "transposed_lhs": (128, 1), "rhs": (128, 1)}.items():
        codes, scales = (part.double().numpy() for part in found[name]["quantized"][side])
        expected, expected_scales = as_torchao(dy, *blocks)
        if side == "transposed_lhs":
            codes, scales = codes.T, scales.T
        np.testing.assert_array_equal(scales, expected_scales, side)
        np.testing.assert_array_equal(codes, expected, side)


@NEEDS_TORCHAO
def test_codes_are_the_definitions_but_for_ties(interpreted):
    problems, found = interpreted
    _, _, dy = problems["plain"]
    codes, scales = (part.double() for part in found["plain"]["quantized"]["lhs"])
    values = (codes * scales.repeat_interleave(128, dim=1))[:300].numpy()
    expected = rounded(dy, "fp8", 448, 1, 128)
    differ = np.abs(values - expected) > 1e-6 * np.abs(expected)
    assert differ.mean() < 1e-4


@NEEDS_TORCHAO
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_torchaos_products_are_near_the_definitions_and_as_near_to_the_exact_ones(interpreted, tokens, dtype):
    problems, found = interpreted
    x, weight, dy = problems[f"{tokens}, {dtype}"]
    _, dx, dw = found[f"{tokens}, {dtype}"]["products"]
    assert (dx.dtype, dw.dtype) == (dtype, torch.float32)
    expected = products(x, weight, torch.zeros(256), dy, "fp8_block", "quantized")
    limit = 1e-3 if dtype == torch.float32 else 2e-2  # x is held in bfloat16 between its two roundings to codes
    assert error(dx, expected["dx"]) < limit
    assert error(dw, expected["dw"]) < limit
    X, W, D = (t.double() for t in (x, weight, dy))
    defined = gradients(x, weight, None, dy, fmt=BLOCK, backward="quantized", emulate=True)
    for got, by_definition, exact in zip((dx, dw), defined[1:], (D @ W, D.T @ X), strict=True):
        assert error(got, exact) < 1.02 * error(by_definition, exact) + 1e-3


@NEEDS_TORCHAO
def test_zeros_no_tokens_and_tiny_gradients(interpreted):
    problems, found = interpreted
    _, dx, dw = found["zeros"]["products"]
    assert torch.isfinite(dx).all()
    assert torch.isfinite(dw).all()
    for part in (dx[3], dx[128:256], dw[40], dw[:, 128:256]):
        assert (part == 0).all()
    assert (dx[4] != 0).any()
    _, dx, dw = found["none"]["products"]
    assert (dx.shape, dw.shape, dw.count_nonzero()) == ((0, 640), (256, 640), 0)
    x, weight, dy = problems["tiny"]
    _, dx, dw = found["tiny"]["products"]
    D = dy.double()
    D[D.abs() < 2**-10 * 1e-12 / 448] = 0  # torchao divides by no less than 1e-12
    assert error(dx, D @ weight.double()) < 0.04
    assert error(dw[128:], (D.T @ x.double())[128:]) < 0.048
    assert torch.isfinite(dw).all()


@NEEDS_TORCHAO
@pytest.mark.parametrize("kind", BAD)
def test_what_is_not_finite_reaches_everything_that_depends_on_it(interpreted, kind):
    """The quantizers make ±448 of nan."""
    _, found = interpreted
    _, dx, dw = found[kind]["products"]
    if kind.startswith("x"):
        assert not torch.isfinite(dw[:, 128:256]).any()
        assert torch.isfinite(dw[:, :128]).all()
        assert torch.isfinite(dx).all()
    else:
        codes = found[kind]["quantized"]["lhs"][0].float()
        assert abs(codes[200, 30]) == 448
        assert not torch.isfinite(dx[200]).any()
        assert torch.isfinite(dx[torch.arange(300) != 200]).all()
        assert not torch.isfinite(dw[30]).any()
