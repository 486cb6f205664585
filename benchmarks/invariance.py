"""Does a row's result depend on what else is computed with it, which rules prevent that, and what do they cost?

    python benchmarks/invariance.py

Prints five tables: row counts at which products differ, in MKL's modes and with oneDNN, and the rule that is found for
them; speeds of the products; errors of attention without each of its rules; log-probs with and without rules; and the
seconds of a decode step with rules over those without. Results, with their machine and date, are in docs/LOG.md.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Annotated, Any
from unittest.mock import patch

from qurl_ray.config.model import TinyModel  # isort: skip  before torch, because it sets MKL's mode

import torch
import typer
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, LlamaConfig

from qurl_ray.engines.torch.decoder import Apply, Decoder, as_function
from qurl_ray.engines.torch.slots import SlotCache
from qurl_ray.numerics import products
from qurl_ray.numerics.processor import processor_name
from qurl_ray.numerics.rules import Rule
from qurl_ray.numerics.selfcheck import attention_rule, kernels, linear_rule
from qurl_ray.policy import attention
from qurl_ray.policy.attention import KEY_CHUNK, KEY_MULTIPLE, NAME, invariant_attention, round_up
from qurl_ray.policy.load import with_row_rules
from qurl_ray.policy.logprobs import token_logprobs
from qurl_ray.policy.settings import head_dim
from qurl_ray.policy.tiny import make_model, make_tokenizer
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.units import units

MODES = ("AUTO", "AUTO,STRICT", "AVX2,STRICT")
SHAPES = ((256, 18), (256, 768), (768, 256), (1536, 576), (2048, 2048))  # K, N
WHOLE = 2048  # rows of the reference product
ROWS = (*range(1, 65), 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
TIMED_ROWS = (1, 2, 4, 32, 512)
STEP_ROWS = (1, 2, 8, 32)
NO_RULE = Rule(kernel="mkl")


# --- products, measured in a process whose MKL_CBWR is the mode ------------------------------------------------


def differing_rows(kernel: str, K: int, N: int, threads: int) -> list[int]:
    """Return the M of ROWS at which any bit of x[:M] · wᵀ differs from that of the product with all WHOLE rows."""
    torch.set_num_threads(threads)
    x, w = (torch.randn(rows, K, generator=_seed(rows)) for rows in (WHOLE, N))
    multiply = kernels()[kernel][0](w)
    whole = multiply(x)
    return [M for M in ROWS if not torch.equal(multiply(x[:M]), whole[:M])]


def microseconds(form: tuple[str, int], K: int, N: int, M: int) -> float:
    """Microseconds of a product with M rows on one thread, repeated for about 50 ms.

    Args:
        form: library, and index of one of its forms of a weight (selfcheck.kernels).
    """
    torch.set_num_threads(1)
    x, w = (torch.randn(rows, K, generator=_seed(rows)) for rows in (M, N))
    kernel, which = form
    return 1e6 * _seconds(partial(kernels()[kernel][which](w), x), for_s=0.05)


# --- attention --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules of qurl_ray/policy/attention.py, each of which can be left out."""

    key_chunk: int | None = KEY_CHUNK
    key_multiple: int = KEY_MULTIPLE
    with_keys: Rule = NO_RULE
    with_values: Rule = NO_RULE


def variants() -> dict[str, Rules]:
    """Return all rules of this machine, and sets that leave out one of them, by name."""
    rule = attention_rule(64) or NO_RULE
    every = Rules(with_keys=rule, with_values=rule)
    return {
        "all rules": every,
        "values in one product": replace(every, key_chunk=None),
        "key length not rounded": replace(every, key_multiple=1),
        "one row with the keys": replace(every, with_keys=NO_RULE),
        "one row with the values": replace(every, with_values=NO_RULE),
    }


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int, rules: Rules) -> torch.Tensor:
    """Causal attention of queries at positions first, first + 1, …; all [heads, length, d]. For this script only."""
    T, S = query.shape[1], round_up(key.shape[1], rules.key_multiple)
    key, value = (pad(part, (0, 0, 0, S - part.shape[1])) for part in (key, value))
    rows = _padded(query * query.shape[-1] ** -0.5, rules.with_keys)
    scores = torch.bmm(rows, key.transpose(1, 2))[:, :T]
    hidden = torch.arange(S) > torch.arange(first, first + T)[:, None]
    weights = _padded(torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1), rules.with_values)
    chunk = rules.key_chunk or S
    products = [torch.bmm(weights[:, :, s : s + chunk], value[:, s : s + chunk]) for s in range(0, S, chunk)]
    return sum(products[1:], start=products[0])[:, :T]


def differing_positions(variant: str, length: int) -> list[int]:
    """Return the positions whose result, computed alone as in an engine, differs from that of all positions at once."""
    torch.set_num_threads(1)
    query, key, value = (torch.randn(8, length, 64, generator=_seed(part)) for part in range(3))
    rules = variants()[variant]
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


def _padded(rows: torch.Tensor, rule: Rule) -> torch.Tensor:
    return pad(rows, (0, 0, 0, rule.padded(rows.shape[1]) - rows.shape[1]))


# --- log-probs --------------------------------------------------------------------------------------------------


@contextmanager
def without_rules() -> Iterator[None]:
    """Inside this context, products are torch's own, and attention pads to two rows at least, enough on Intel."""
    with patch.object(products, "linear_rule", lambda *_: None), patch.object(attention, "attention_rule", two_rows):
        yield


def two_rows(head_dim: int) -> Rule:
    return Rule(kernel="mkl", rows=2)


@torch.no_grad()
def logprob_gap(format_name: str, by_rule: bool) -> tuple[int, int, float]:
    """Return (tokens whose log-prob differs, tokens, largest difference in nats) for 128 short sequences.

    They are computed at once and one by one, by a random policy of the tiny model's default shape, whose matrices have
    four times the initial size.
    """
    torch.set_num_threads(1)
    with nullcontext() if by_rule else without_rules():
        return _logprob_gap(format_name)


def _logprob_gap(format_name: str) -> tuple[int, int, float]:
    tokenizer = make_tokenizer()
    model = make_model(TinyModel(), tokenizer).eval()
    for parameter in model.parameters():
        parameter.mul_(4 if parameter.ndim == 2 else 1)
    if format_name != "none":
        for unit in units(model, [r"lm_head"]).values():
            layer = model.get_submodule(unit.module)
            q = quantize(layer.weight, get_format(format_name))
            model.set_submodule(unit.module, QuantizedLinear(q, layer.bias, emulate=True))
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


# --- decode steps -----------------------------------------------------------------------------------------------


STEPS = {
    "quickstart": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 18},
    "SmolLM2-135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "vocab_size": 49152},
}
"""Configurations of the timed policies, by name."""
KEYS = 64  # keys that each row of a timed step attends to


@torch.inference_mode()
def step_seconds(policy: str, format_name: str, rows: int, threads: int, rounds: int) -> list[tuple[float, float]]:
    """Return pairs (by rule, without rules) of the seconds of one decode step and its head."""
    torch.set_num_threads(threads)
    model = with_row_rules(AutoModelForCausalLM.from_config(LlamaConfig(**STEPS[policy]), attn_implementation=NAME))
    if format_name != "none":
        for unit in units(model, [r"lm_head"]).values():
            layer = model.get_submodule(unit.module)
            model.set_submodule(
                unit.module, QuantizedLinear(quantize(layer.weight, get_format(format_name)), layer.bias)
            )
    config = model.config
    by_rule = Decoder(model), as_function(model.lm_head)
    with without_rules():
        without = Decoder(model), as_function(model.lm_head)
    cache = SlotCache(
        layers=config.num_hidden_layers,
        slots=rows,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        length=KEYS,
    )
    ids, positions = torch.zeros(rows, 1, dtype=torch.int64), torch.full((rows,), KEYS - 1)

    def step(decoder: Decoder, head: Apply) -> None:
        cache.decode(positions)
        head(decoder(ids, positions[:, None], cache)[:, 0])

    pairs = []
    for _ in range(rounds):
        first = _seconds(partial(step, *by_rule))
        with without_rules():
            pairs.append((first, _seconds(partial(step, *without))))
    return pairs


def _seconds(call: Callable[[], object], for_s: float = 0.2) -> float:
    """Seconds of one call: the mean of calls repeated for `for_s` seconds, after one call to warm up."""
    call()
    count, started = 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < for_s:
        call()
        count += 1
    return seconds / count


# --- report -----------------------------------------------------------------------------------------------------


class Process:
    """A process that starts with MKL_CBWR set to `mode`. MKL reads the variable once, at its first product."""

    def __init__(self, mode: str, stack: ExitStack) -> None:
        os.environ["MKL_CBWR"] = mode  # a spawned process gets the environment at its start
        self._pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        assert self.run(os.getenv, "MKL_CBWR") == mode

    def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        return self._pool.submit(function, *arguments).result()


def differences(processes: dict[str, Process], threads: int) -> Iterator[list[str]]:
    """Yield one row per shape: the M at which rows differ, with MKL in each mode and with oneDNN, and the rule."""
    for K, N in SHAPES:
        found = [process.run(differing_rows, "mkl", K, N, threads) for process in processes.values()]
        found.append(processes["AUTO,STRICT"].run(differing_rows, "onednn", K, N, threads))
        rule = processes["AUTO,STRICT"].run(linear_rule, K, N)
        yield [f"{K} × {N}", *(ranges(rows, ROWS) for rows in found), str(rule)]


def speeds(process: "Process", rounds: int) -> Iterator[list[str]]:
    """Yield one row per shape: speedup of oneDNN over MKL in strict mode, with the weight as it is, and packed.

    Both take turns. Each speedup is a median of the rounds.
    """
    forms = ("mkl", 0), ("onednn", 0), ("onednn", 1)
    for K, N in SHAPES:
        cells = []
        for M in TIMED_ROWS:
            seen = [[process.run(microseconds, form, K, N, M) for form in forms] for _ in range(rounds)]
            cells.append(" · ".join(f"{statistics.median(row[0] / row[form] for row in seen):.2f}" for form in (1, 2)))
        yield [f"{K} × {N}", *cells]


def steps(process: "Process", threads: int, rounds: int) -> Iterator[list[str]]:
    """Yield one row per policy and format: decode seconds by rule over those without, as median (least to most)."""
    for policy in STEPS:
        for format_name in ("none", "int8"):
            cells = []
            for rows in STEP_ROWS:
                pairs = process.run(step_seconds, policy, format_name, rows, threads, rounds)
                ratios = sorted(by_rule / without for by_rule, without in pairs)
                cells.append(f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
            yield [f"{policy}, {format_name}", *cells]


def positions(processes: dict[str, Process], length: int) -> Iterator[list[str]]:
    """Yield one row per variant: how many positions differ, and which, in each mode."""
    for variant in variants():
        found = [process.run(differing_positions, variant, length) for process in processes.values()]
        yield [variant, *(f"{len(at)}: {ranges(at, range(length))}" for at in found)]


def gaps(processes: dict[str, Process]) -> Iterator[list[str]]:
    """Yield one row per format, without rules and by rule: number of differing log-probs, largest difference."""
    for name, by_rule in product(("none", "int8"), (False, True)):
        found = (process.run(logprob_gap, name, by_rule) for process in processes.values())
        cells = (f"{differ} of {tokens}, max {largest:.1e}" for differ, tokens, largest in found)
        yield [f"{name}, {'by rule' if by_rule else 'without'}", *cells]


def ranges(found: Sequence[int], tested: Sequence[int], most: int = 4) -> str:
    """Return the runs of neighbours among the tested numbers as text, such as `1–15, 80–192`; at most `most` runs."""
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
    """Return processor with vector extensions, cores, torch, MKL and date as one line."""
    mkl = next((part for part in torch.__config__.show().splitlines() if "oneAPI" in part), "no MKL").strip(" -")
    return f"{processor_name()}, {os.cpu_count()} cores; torch {torch.__version__}; {mkl}; {date.today()}"


def main(
    threads: Annotated[int, typer.Option(help="Threads of the products that are compared; all else uses one.")] = 2,
    length: Annotated[int, typer.Option(help="Positions of the attention.")] = 500,
    rounds: Annotated[int, typer.Option(help="Measurements of each speed, of which the median counts.")] = 7,
) -> None:
    """Count rows, positions and log-probs that depend on what else is computed, with and without strict mode."""
    print(machine())
    with ExitStack() as stack:
        processes = {mode: Process(mode, stack) for mode in MODES}
        strict = processes["AUTO,STRICT"]
        show(
            f"M at which a row of [M, K] · [K, N] differs from the {WHOLE}-row product, {threads} threads",
            ["K × N", *(f"MKL {mode}" for mode in MODES), "oneDNN", "rule"],
            differences(processes, threads),
        )
        show(
            f"oneDNN times as fast as MKL AUTO,STRICT, weight as it is · packed, one thread, median of {rounds}",
            ["K × N", *(f"{M} rows" for M in TIMED_ROWS)],
            speeds(strict, rounds),
        )
        show(
            f"positions of {length} at which one query alone differs from all at once",
            ["attention", *MODES],
            positions(processes, length),
        )
        show("log-probs of 128 sequences of 9 tokens, at once against one by one", ["linears", *MODES], gaps(processes))
        show(
            f"decode step by rule over the same without, {KEYS} keys, {threads} threads, {rounds} pairs",
            ["policy, linears", *(f"{rows} row{'s' * (rows > 1)}" for rows in STEP_ROWS)],
            steps(strict, threads, rounds),
        )


def show(title: str, header: list[str], rows: Iterator[list[str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
