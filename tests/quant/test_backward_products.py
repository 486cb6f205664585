"""The products of a backward pass in FP8 blocks: which entry is used, that nothing waits for a GPU, what is computed of
operands that are quantized in one pass. No GPU is needed: operations run on tensors without data, Triton's kernels in
its interpreter."""

import importlib.util
from contextlib import nullcontext

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
from tests.quant.interpreted import interpreted
from tests.quant.test_kernel_table import CPU, CUDA, gpu
from tests.quant.test_unified import BLOCK, MODES, error, gradients, problem, products

BF16 = torch.bfloat16

# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "shape", "name"),
    [
        ((9, 0), (300, 256, 640), "scaled_mm"),
        ((9, 0), (300, 576, 640), "emulation"),
        ((9, 0), (300, 256, 576), "emulation"),
        ((8, 9), (300, 256, 640), "emulation"),
        ((10, 0), (300, 256, 640), "emulation"),
    ],
)
def test_the_first_that_fits_is_used(monkeypatch, capability, shape, name):
    gpu(monkeypatch, capability)
    assert products_for(BLOCK, CUDA, shape).name == name
    assert products_for(BLOCK, CPU, shape).name == "emulation"
    assert products_for(FORMATS["fp8"], CUDA, shape).name == "emulation"


def test_what_is_not_used_is_announced_with_the_reason(monkeypatch):
    assert announced(BLOCK, CPU) == "emulation: scaled_mm_block needs a device of type cuda, not cpu"
    gpu(monkeypatch, (9, 0))
    assert announced(BLOCK, CUDA) == "scaled_mm"
    gpu(monkeypatch, (9, 0), cuda="12.8")
    assert announced(BLOCK, CUDA) == "emulation: scaled_mm_block needs a torch for CUDA 12.9 or later, not 12.8"


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
    monkeypatch.setattr(type(KERNELS["scaled_mm_block"]), "device_type", "meta")
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # it does not know that device


ENTRIES = ["scaled_mm", "emulation"]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("name", ENTRIES)
def test_no_product_waits_for_the_gpu_and_cublas_gets_the_layouts_that_it_takes(monkeypatch, name, dtype):
    """torch checks types, shapes and strides of scaled_mm's operands with data or without."""
    use(monkeypatch, name)
    forward, backward = on_no_gpu(how(emulate=name == "emulation"), dtype)
    count = [sum(operation == "_scaled_mm_v2" for operation, *_ in one.made) for one in (forward, backward)]
    assert count == ([0, 0] if name == "emulation" else [1, 2])


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


# --- in Triton's interpreter ------------------------------------------------------------------------------------------


def special(kind: str) -> tuple[torch.Tensor, ...]:
    """x, weight, dy of 300 tokens."""
    x, weight, _, dy = (t.detach().clone() for t in problem(300, 256, 384))
    if kind == "zeros":
        x[140], x[:, 128:256], dy[3], dy[:, 40], weight[128:] = 0, 0, 0, 0, 0
        dy[128:256] = 0
    elif kind == "tiny":  # groups of subnormal numbers, of tiny ones, and of both with others
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
def computed(tmp_path_factory):
    """(problems, [y, dx, dW] as cuBLAS computes them) by name."""
    if not importlib.util.find_spec("triton"):
        pytest.skip("needs Triton: the extra cpu brings it")
    problems = {kind: special(kind) for kind in ("plain", "zeros", "tiny", *BAD)}
    problems["none"] = torch.zeros(0, 640), problems["plain"][1].repeat(1, 5)[:, :640], torch.zeros(0, 256)
    for tokens in TOKENS:
        x, weight, _, dy = (t.detach() for t in problem(tokens, 256, 640, torch.float32))
        problems[str(tokens)] = x, weight, dy
    return problems, interpreted(problems, tmp_path_factory.mktemp("interpreted"))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["plain", "zeros", "tiny", *map(str, TOKENS)])
def test_products_are_the_definitions(computed, name):
    problems, found = computed
    x, weight, dy = problems[name]
    y, dx, dw = found[name]
    expected = products(x, weight, torch.zeros(256), dy, "fp8_block", "quantized")
    emulated = gradients(x, weight, None, dy, fmt=BLOCK, backward="quantized", emulate=True)
    for got, key, own in zip((y, dx, dw), ("y", "dx", "dw"), emulated, strict=True):
        assert error(got, expected[key]) < 1e-3
        assert error(got, own) < 1e-5, "the same codes, summed in another order"


def test_zeros_and_no_tokens(computed):
    _, found = computed
    _, dx, dw = found["zeros"]
    for part in (dx[3], dx[128:256], dw[40], dw[:, 128:256]):
        assert (part == 0).all()
    assert (dx[4] != 0).any()
    _, dx, dw = found["none"]
    assert (dx.shape, dw.shape, dw.count_nonzero()) == ((0, 640), (256, 640), 0)


@pytest.mark.parametrize("kind", BAD)
def test_what_is_not_finite_reaches_everything_that_depends_on_it(computed, kind):
    _, found = computed
    _, dx, dw = found[kind]
    if kind.startswith("x"):
        assert not torch.isfinite(dw[:, 128:256]).any()
        assert torch.isfinite(dw[:, :128]).all()
        assert torch.isfinite(dx).all()
    else:
        assert not torch.isfinite(dx[200]).any()
        assert not torch.isfinite(dw[30]).any()
        assert torch.isfinite(dx[torch.arange(300) != 200]).all()
