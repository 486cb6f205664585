"""Does a row's result depend on what else is computed with it? What breaks without MKL's strict mode and the rules of
qurl_ray/policy/attention.py, and what the strict mode costs. Results, with their machine and date, are in docs/LOG.md.

    python benchmarks/invariance.py
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn.functional import linear, pad

from qurl_ray.config.models import TinyModel
from qurl_ray.policy.attention import KEY_CHUNK, KEY_MULTIPLE, invariant_attention, round_up
from qurl_ray.policy.logprobs import token_logprobs
from qurl_ray.policy.tiny import make_model, make_tokenizer
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.select import quantized_linears

MODES = ("AUTO", "AUTO,STRICT", "AVX2,STRICT")
SHAPES = ((256, 768), (768, 256), (1536, 576), (2048, 2048))  # K, N
WHOLE = 2048  # rows of the product to compare with
ROWS = (*range(1, 65), 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
TIMED_ROWS = 512


# --- products, measured in a process whose MKL_CBWR is the mode ------------------------------------------------


def differing_rows(K: int, N: int, threads: int) -> list[int]:
    """The M of ROWS at which a row of x[:M] · wᵀ is not, bit for bit, that of the product with all WHOLE rows."""
    torch.set_num_threads(threads)
    x, w = (torch.randn(rows, K, generator=_seed(rows)) for rows in (WHOLE, N))
    whole = linear(x, w)
    return [M for M in ROWS if not torch.equal(linear(x[:M], w), whole[:M])]


def gigaflops(K: int, N: int) -> float:
    """Of one product with TIMED_ROWS rows on one thread, repeated for about 50 ms."""
    torch.set_num_threads(1)
    x, w = (torch.randn(rows, K, generator=_seed(rows)) for rows in (TIMED_ROWS, N))
    linear(x, w)
    count, started = 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < 0.05:
        linear(x, w)
        count += 1
    return 2 * TIMED_ROWS * K * N * count / seconds / 1e9


# --- attention --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of qurl_ray/policy/attention.py, each of which can be left out."""

    key_chunk: int | None = KEY_CHUNK
    key_multiple: int = KEY_MULTIPLE
    rows_with_keys: int = 2
    rows_with_values: int = 2


VARIANTS = {
    "all rules": Rules(),
    "values in one product": Rules(key_chunk=None),
    "key length not rounded": Rules(key_multiple=1),
    "one row with the keys": Rules(rows_with_keys=1),
    "one row with the values": Rules(rows_with_values=1),
}


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int, rules: Rules) -> torch.Tensor:
    """Causal attention of queries at positions first, first + 1, …; all [heads, length, d]. Written for this script."""
    T, S = query.shape[1], round_up(key.shape[1], rules.key_multiple)
    key, value = (pad(part, (0, 0, 0, S - part.shape[1])) for part in (key, value))
    scores = torch.bmm(_at_least(query, rules.rows_with_keys), key.transpose(1, 2))[:, :T] * query.shape[-1] ** -0.5
    hidden = torch.arange(S) > torch.arange(first, first + T)[:, None]
    weights = _at_least(torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1), rules.rows_with_values)
    chunk = rules.key_chunk or S
    products = [torch.bmm(weights[:, :, s : s + chunk], value[:, s : s + chunk]) for s in range(0, S, chunk)]
    return sum(products[1:], start=products[0])[:, :T]


def differing_positions(variant: str, length: int) -> list[int]:
    """Positions whose result, computed alone as an engine does, is not that of all positions at once."""
    torch.set_num_threads(1)
    query, key, value = (torch.randn(8, length, 64, generator=_seed(part)) for part in range(3))
    rules = VARIANTS[variant]
    whole = attend(query, key, value, 0, rules)
    if variant == "all rules":
        assert torch.equal(whole, _of_the_package(query, key, value)), "this script must compute what the package does"
    alone = (attend(query[:, t : t + 1], key[:, : t + 1], value[:, : t + 1], t, rules) for t in range(length))
    return [t for t, one in enumerate(alone) if not torch.equal(one[:, 0], whole[:, t])]


def _of_the_package(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    parts = (part[None] for part in (query, key, value))
    positions = torch.arange(query.shape[1])[None]
    out, _ = invariant_attention(torch.nn.Identity(), *parts, scaling=query.shape[-1] ** -0.5, position_ids=positions)
    return out[0].transpose(0, 1)


def _at_least(rows: torch.Tensor, count: int) -> torch.Tensor:
    return rows.expand(-1, count, -1) if rows.shape[1] < count else rows


# --- log-probs --------------------------------------------------------------------------------------------------


@torch.no_grad()
def logprob_gap(format_name: str) -> tuple[int, int, float]:
    """(tokens whose log-prob differs, tokens, largest difference in nats): 128 short sequences at once or one by one.

    A random policy of the tiny model's default shape, its matrices four times the initial size.
    """
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(TinyModel(), tokenizer).eval()
    for parameter in model.parameters():
        parameter.mul_(4 if parameter.ndim == 2 else 1)
    if format_name != "none":
        for name in quantized_linears(model, [r"lm_head"]):
            layer = model.get_submodule(name)
            q = quantize(layer.weight, get_format(format_name))
            model.set_submodule(name, QuantizedLinear(q, layer.bias, emulate=True))
    ids_BT = torch.randint(len(tokenizer), (128, 9), generator=_seed(0))
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    mask_BT[:, 0] = False
    whole = token_logprobs(model, ids_BT, mask_BT, temperature=1.0)
    rows = zip(ids_BT.split(1), mask_BT.split(1), strict=True)
    alone = torch.cat([token_logprobs(model, ids, mask, temperature=1.0) for ids, mask in rows])
    gap_N = (whole - alone)[mask_BT].abs()
    return int((gap_N > 0).sum()), len(gap_N), float(gap_N.max())


def _seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


# --- report -----------------------------------------------------------------------------------------------------


class Process:
    """A process that starts with MKL_CBWR set to `mode`: MKL reads it once, at its first product."""

    def __init__(self, mode: str, stack: ExitStack) -> None:
        os.environ["MKL_CBWR"] = mode  # a spawned process takes the environment of the moment it starts
        self._pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        assert self.run(os.getenv, "MKL_CBWR") == mode

    def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        return self._pool.submit(function, *arguments).result()


def products(processes: dict[str, Process], threads: int) -> Iterator[list[str]]:
    """One row per shape: at which M rows differ, in each mode."""
    for K, N in SHAPES:
        found = (process.run(differing_rows, K, N, threads) for process in processes.values())
        yield [f"{K} × {N}", *(ranges(rows, ROWS) for rows in found)]


def speeds(processes: dict[str, Process], rounds: int) -> Iterator[list[str]]:
    """One row per shape: median GFLOP/s in each mode and its ratio to the first; modes take turns."""
    for K, N in SHAPES:
        seen = [[process.run(gigaflops, K, N) for process in processes.values()] for _ in range(rounds)]
        medians = [statistics.median(column) for column in zip(*seen, strict=True)]
        yield [f"{K} × {N}", *(f"{speed:.0f} ({speed / medians[0]:.2f})" for speed in medians)]


def positions(processes: dict[str, Process], length: int) -> Iterator[list[str]]:
    """One row per variant: how many positions differ, and which, in each mode."""
    for variant in VARIANTS:
        found = [process.run(differing_positions, variant, length) for process in processes.values()]
        yield [variant, *(f"{len(at)}: {ranges(at, range(length))}" for at in found)]


def gaps(processes: dict[str, Process]) -> Iterator[list[str]]:
    """One row per format: share of tokens whose log-prob differs, and by how much at most."""
    for name in ("none", "int8"):
        found = (process.run(logprob_gap, name) for process in processes.values())
        yield [name, *(f"{differ} of {tokens}, max {largest:.1e}" for differ, tokens, largest in found)]


def ranges(found: Sequence[int], tested: Sequence[int], most: int = 4) -> str:
    """`1–15, 80–192`: runs of neighbours among the tested numbers; the first `most` of them."""
    runs: list[list[int]] = []
    for before, number in zip((None, *tested), tested, strict=False):
        if number in found:
            if before in found:
                runs[-1].append(number)
            else:
                runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "") or "none"


def machine() -> str:
    """Processor, its vector extensions, cores, torch and MKL, date."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    model = names[0] if names else platform.processor()
    mkl = next((part for part in torch.__config__.show().splitlines() if "oneAPI" in part), "no MKL").strip(" -")
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{model}, {capability}, {os.cpu_count()} cores; torch {torch.__version__}; {mkl}; {date.today()}"


def main(
    threads: Annotated[int, typer.Option(help="Threads of the products that are compared; all else uses one.")] = 2,
    length: Annotated[int, typer.Option(help="Positions of the attention.")] = 500,
    rounds: Annotated[int, typer.Option(help="Measurements of each speed, of which the median counts.")] = 7,
) -> None:
    """Count the rows, positions and log-probs that depend on what else is computed, with and without strict mode."""
    print(machine())
    with ExitStack() as stack:
        processes = {mode: Process(mode, stack) for mode in MODES}
        show(
            f"M at which a row of [M, K] · [K, N] differs from the {WHOLE}-row product, {threads} threads",
            "K × N",
            products(processes, threads),
        )
        show(
            f"GFLOP/s with {TIMED_ROWS} rows, one thread, median of {rounds} (ratio to {MODES[0]})",
            "K × N",
            speeds(processes, rounds),
        )
        show(
            f"positions of {length} at which one query alone differs from all at once",
            "attention",
            positions(processes, length),
        )
        show("log-probs of 128 sequences of 9 tokens, at once against one by one", "linears", gaps(processes))


def show(title: str, corner: str, rows: Iterator[list[str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join((corner, *MODES))} |\n|{'---|' * (len(MODES) + 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
