"""The self-check: finds how float32 products must be called on this machine so that each row depends on itself alone.

Each product is checked when it is first needed, which takes a fraction of a second. The result is kept in the cache
folder for other processes on machines of the same kind. It is the same in every process of a machine: it depends on the
processor, torch, the variables of its libraries and the number of cores, but not on measured times.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from torch.nn.functional import linear, pad

from qurl_ray.cache import cache_root, writable
from qurl_ray.environment import TORCH_WAS_FIRST
from qurl_ray.files import write_whole
from qurl_ray.numerics.processor import cpuinfo
from qurl_ray.numerics.rules import MOST_ROWS, WHOLE, MatmulLibrary, Rule, find_rows

_RECIPE = 4  # raise when a change below, or in numerics.rules, alters the result
_WIDE = 192  # with at least so many outputs, MKL's kernels were seen to share one order of sums (docs/LOG.md)
_FEW_ROWS = 8  # if a rule requires more, padded outputs are tried as well
_MOST_OUTPUTS = 512  # wider products are measured at this width plus their own modulo 64
_KEYS = (16, 48, 144)  # key counts of attention: multiples of attention.KEY_MULTIPLE
_CHUNKS = (16, 128)  # key counts of a chunk: up to attention.KEY_CHUNK
_BATCHES = (2, 5)
VARIABLES = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Environment variables that choose kernels, which all processes of a run must share."""

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of rows [M, K] and a weight [N, K] that returns their product [M, N]."""
Bind = Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
"""Function of a weight that returns the product with it, as a function of rows."""


def onednn_product(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x · weightᵀ + bias by oneDNN, float32, without a gradient. Neither factor has to be contiguous."""
    return torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, bias_N, "none", [], "")


def onednn_packed(weight_NK: torch.Tensor) -> torch.Tensor:
    """Return the weight in the order in which oneDNN multiplies it, for `onednn_product`; `to_dense()` restores it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_NK, None)


def kernels() -> dict[MatmulLibrary, tuple[Bind, ...]]:
    """Return the libraries for float32 products here, each with the forms of a weight that must give the same bits."""
    bindings: dict[MatmulLibrary, tuple[Bind, ...]] = {"mkl": (_times(linear),)}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        times = _times(onednn_product)
        bindings["onednn"] = (times, lambda weight: times(onednn_packed(weight)))
    return bindings


def _times(multiply: Multiply) -> Bind:
    return lambda factor: lambda x: multiply(x, factor)


@cache
def thread_counts() -> tuple[int, ...]:
    """Thread counts that rules are measured with: one, two and all cores. The requirements of a product grow with the
    number of threads (docs/LOG.md), so the counts between are left out."""
    return tuple(sorted({1, 2, os.cpu_count() or 1}))


# --- rules of this machine -------------------------------------------------------------------------------------------


@cache
def linear_rule(inner: int, outputs: int) -> Rule | None:
    """Return the rule of products with a weight [outputs, inner]; None if this machine has none."""
    return _kept(f"linear {outputs}x{inner}", lambda: find_linear_rule(inner, outputs, kernels(), thread_counts()))


@cache
def attention_rule(head_dim: int) -> Rule | None:
    """Return the rule of both products of attention with heads of this width; None if this machine has none."""
    return _kept(f"attention {head_dim}", lambda: find_attention_rule(head_dim, torch.bmm, thread_counts()))


def find_linear_rule(
    inner: int, outputs: int, multiply: Mapping[MatmulLibrary, Sequence[Bind]], threads: Iterable[int]
) -> Rule | None:
    """Measure and return the rule that requires the fewest rows; MKL's if oneDNN's requires as many."""
    threads = tuple(threads)
    width = outputs if outputs <= _MOST_OUTPUTS else _MOST_OUTPUTS + outputs % 64
    x, weight = _random(WHOLE, inner), _random(width, inner)
    best: Rule | None = None
    tried: tuple[tuple[MatmulLibrary, int], ...] = (("onednn", 0), ("mkl", 0), ("mkl", _WIDE))
    for kernel, least in tried:
        if kernel not in multiply or (least and (width >= least or (best and best.rows <= _FEW_ROWS))):
            continue
        wide = pad(weight, (0, 0, 0, max(0, least - width)))
        at_most = best.rows if best else MOST_ROWS
        computes = [(bind(wide), x) for bind in multiply[kernel]]
        alike = all(torch.equal(compute(x), computes[0][0](x)) for compute, _ in computes[1:])
        if alike and (requirement := find_rows(computes, at_most=at_most, threads=threads)):
            best = Rule(kernel=kernel, rows=requirement[0], multiple=requirement[1], outputs=least)
    return best


def find_attention_rule(head_dim: int, bmm: Multiply, threads: Iterable[int]) -> Rule | None:
    """Measure and return the rule that requires the fewest rows, for queries · keys and for probabilities · values.

    A call with one product may use another kernel than a call with several, and either may need more rows. So the rule
    is measured with calls of several products alone, and with calls of one, too; the latter wins if it asks for no more
    rows. Products must have the same bits whatever their number.
    """
    threads = tuple(threads)
    queries = _random(_BATCHES[-1], WHOLE, head_dim)
    pairs = [(queries, _random(len(queries), keys, head_dim).transpose(1, 2)) for keys in _KEYS]
    for keys in _CHUNKS:
        probabilities = torch.softmax(_random(len(queries), WHOLE, keys), dim=-1)
        pairs.append((probabilities, _random(len(queries), keys, head_dim)))
    wholes = [(x, factor, bmm(x, factor)) for x, factor in pairs]
    best: Rule | None = None
    for batches in (_BATCHES, (1, *_BATCHES)):
        parts = [(x[:n], factor[:n], whole[:n]) for n in batches for x, factor, whole in wholes]
        if not all(torch.equal(bmm(x, factor), whole) for x, factor, whole in parts):
            continue
        computes = [(_times(bmm)(factor), x) for x, factor, _ in parts]
        requirement = find_rows(computes, at_most=best.rows if best else MOST_ROWS, threads=threads)
        if requirement and (best is None or requirement <= (best.rows, best.multiple)):
            best = Rule(kernel="mkl", rows=requirement[0], multiple=requirement[1], batch=batches[0])
    return best


def _random(*shape: int) -> torch.Tensor:
    # A seed for each shape: rows equal to the weight's gave a product of two inputs a rule of one row, which was wrong.
    seed = sum(size << 12 * place for place, size in enumerate(shape))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- the cache -------------------------------------------------------------------------------------------------------


def _kept(name: str, find: Callable[[], Rule | None]) -> Rule | None:
    """Return the rule of this name from the cache folder. If it is not there, find it and store it there."""
    file = _file()
    rules = _read(file)
    if name not in rules:
        with torch.inference_mode(False), torch.no_grad():
            rule = find()
        rules = _read(file) | {name: asdict(rule) if rule else None}
        if file and writable.get():
            with suppress(OSError):  # without a writable folder, rules are measured again, nothing more
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, json.dumps(rules, indent=1))  # rules that two processes add at once may get lost
    fields = rules[name]
    return Rule(**fields) if fields else None


@cache
def _file() -> Path | None:
    """Return the file of rules for such machines; None if torch may have computed before MKL_CBWR was set."""
    if TORCH_WAS_FIRST:
        return None
    variables = {name: os.environ.get(name) for name in VARIABLES}
    info = cpuinfo()
    processor = [info.get(key) for key in ("vendor_id", "cpu family", "model", "stepping", "flags")]
    machine = [_RECIPE, processor, torch.__version__, torch.__config__.show(), variables, thread_counts()]
    digest = hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:16]
    return cache_root() / f"row-rules-{digest}.json"


def _read(file: Path | None) -> dict[str, dict | None]:
    if file is None:
        return {}
    with suppress(OSError, ValueError):
        return json.loads(file.read_text())
    return {}
