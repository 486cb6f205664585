"""Memory and time of one update on long answers: python benchmarks/memory.py, or --quick for a look at small sizes.

A slice of Qwen2.5-7B (its width, few of its layers) runs forward and backward over one micro-batch. Every token except
the first of each sequence is scored. Each row of a table adds one method that bounds memory to those above it; each
cell has a process of its own. Memory is the peak beyond weights and gradients, which are allocated before. A cell that
does not fit is marked as such: nothing is extrapolated. Results are in benchmarks/results/memory.json.
"""

import gc
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from shared import machine
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from qurl_ray.policy import attention, logprobs

GIB = 2**30
WITHOUT_BOUND = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Methods that bound memory. A method that is not used is disabled."""

    name: str
    pieces_of_logits: bool = False
    chunks_of_queries: bool = False
    packing: bool = False
    checkpointing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Settings of one cell."""

    variant: Variant
    lengths: tuple[int, ...]
    layers: int
    vocabulary: int
    device: str
    limit: int
    """Memory that the process may have in total, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Memory and time of a case; None if it did not fit."""

    peak: int | None
    """Peak memory beyond weights and gradients, in bytes."""
    forward_seconds: float | None
    backward_seconds: float | None


DOES_NOT_FIT = Measured(peak=None, forward_seconds=None, backward_seconds=None)


def cumulative() -> list[Variant]:
    """Return the variants, from none of the methods to all of them."""
    variants = [Variant(name="padded, all scores, all logits")]
    for name, used in (
        ("+ logits in pieces", "pieces_of_logits"),
        ("+ queries in chunks", "chunks_of_queries"),
        ("+ packed rows", "packing"),
        ("+ blocks computed again", "checkpointing"),
    ):
        variants.append(replace(variants[-1], name=name, **{used: True}))
    return variants


def mixed(tokens: int) -> tuple[int, ...]:
    """Lengths of seven answers with `tokens` tokens in total: one of 1/2, two of 3/16, four of 1/32."""
    return (tokens // 2, *[3 * tokens // 16] * 2, *[tokens // 32] * 4)


# --- one cell, in its own process --------------------------------------------------------------------------------


def measure(case: Case) -> Measured:
    """Run forward and backward once, within the memory limit of the case."""
    resource.setrlimit(resource.RLIMIT_DATA, (case.limit, case.limit))
    try:
        return _measure(case)
    except RuntimeError as error:  # from the allocator; any other error is a bug
        if "memory" not in str(error):
            raise
        return DOES_NOT_FIT


def _measure(case: Case) -> Measured:
    use = case.variant
    if not use.pieces_of_logits:
        logprobs.HEAD_BYTES = WITHOUT_BOUND
    logprobs.KEPT_BYTES = 0  # as on a GPU
    if not use.chunks_of_queries:
        attention.QUERY_CHUNK = WITHOUT_BOUND
    model = _model(case)
    if use.checkpointing:
        logprobs.enable_checkpointing(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    lengths_B = torch.tensor(case.lengths, device=case.device)
    ids_BT = torch.randint(case.vocabulary, (len(case.lengths), max(case.lengths)), device=case.device)
    at_T = torch.arange(ids_BT.shape[1], device=case.device)
    mask_BT = (at_T > 0) & (at_T < lengths_B[:, None])
    peak = _peak_from_now(case.device)
    started = time.perf_counter()
    out_BT = logprobs.token_logprobs(model, ids_BT, mask_BT, 1.0, lengths_B=lengths_B if use.packing else None)
    loss = -out_BT.sum() / mask_BT.sum()
    loss.item()  # waits for a GPU
    between = time.perf_counter()
    loss.backward()
    if case.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - between
    return Measured(peak=peak(), forward_seconds=between - started, backward_seconds=seconds)


def _model(case: Case) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=case.vocabulary,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=case.layers,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        attn_implementation=attention.NAME,
    )
    with torch.device(case.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _peak_from_now(device: str) -> Callable[[], int]:
    """Return a function that returns how far memory has grown at most since this call, in bytes."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return lambda: torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    return lambda: _status("VmHWM") - before


def _status(key: str) -> int:
    """Return a figure that the kernel keeps of this process (such as VmRSS), in bytes."""
    return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


# --- report ------------------------------------------------------------------------------------------------------


def run(case: Case) -> Measured:
    """Call `measure` in a new process whose heap returns freed tensors at once: only live tensors hold pages."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read when the process starts
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(measure, case).result()
        except BrokenProcessPool:  # the kernel killed it
            return DOES_NOT_FIT


def cell(measured: Measured, limit: int) -> str:
    if measured.peak is None:
        return f"does not fit in {limit / GIB:.0f}"
    return f"{measured.peak / GIB:.2f} ({measured.forward_seconds:.0f} + {measured.backward_seconds:.0f} s)"


def main(
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens of a micro-batch, one column each.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the slice.")] = 2,
    vocabulary: Annotated[int, typer.Option(help="Rows of the head; Qwen2.5-7B has 152064.")] = 152064,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    limit_gib: Annotated[
        float | None, typer.Option(help="Memory limit of a process; 3/4 of the free memory if absent.")
    ] = None,
    batch: Annotated[list[str] | None, typer.Option(help="mixed or single; both if absent.")] = None,
    row: Annotated[list[int] | None, typer.Option(help="Rows to measure, from 0; all if absent.")] = None,
    quick: Annotated[bool, typer.Option(help="One layer, a vocabulary of 8192, 1024 tokens.")] = False,
    out: Annotated[Path | None, typer.Option(help="Add the figures to this JSON file.")] = None,
) -> None:
    """Print one table per batch: peak GiB beyond weights and gradients, and seconds of forward + backward.

    A process that would need more than the limit, weights and gradients included, does not fit.
    """
    sizes = tokens or [8192]
    if quick:
        sizes, layers, vocabulary = [1024], 1, 8192
    limit = int(GIB * limit_gib) if limit_gib else _free() * 3 // 4
    load = os.getloadavg()[0]
    shape = f"{layers} layers, vocabulary {vocabulary}, float32 on {device}, {torch.get_num_threads()} threads"
    print(f"{machine()}; {shape}; load before {load:.1f}: times are noisy", flush=True)
    kinds = {"mixed": mixed, "single": lambda count: (count,)}
    results: list[dict[str, Any]] = []
    for kind in batch or kinds:
        print(
            f"\n{kind}\n\n| | {' | '.join(f'{size} tokens' for size in sizes)} |\n|{'---|' * (len(sizes) + 1)}",
            flush=True,
        )
        variants = cumulative()
        for variant in [variants[index] for index in row] if row else variants:
            cells = []
            for size in sizes:
                print(f"{kind}, {variant.name}, {size} tokens …", file=sys.stderr, flush=True)
                case = Case(variant=variant, lengths=kinds[kind](size), layers=layers, vocabulary=vocabulary,
                            device=device, limit=limit)  # fmt: skip
                measured = run(case)
                cells.append(cell(measured, limit))
                results.append(asdict(case) | {"variant": variant.name, "batch": kind, "tokens": size}
                               | asdict(measured))  # fmt: skip
            print(f"| {variant.name} | {' | '.join(cells)} |", flush=True)
    if out:
        earlier = json.loads(out.read_text()) if out.exists() else []
        earlier.append(
            {"machine": machine(), "load_before": load, "threads": torch.get_num_threads(), "cells": results}
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(earlier, indent=2) + "\n")


def _free() -> int:
    """Memory that a new process can have without swapping, in bytes."""
    return 1024 * int(re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1])


if __name__ == "__main__":
    typer.run(main)
