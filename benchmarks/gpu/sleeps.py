"""Sleep, wake, load, again and again: seconds of each, and whether memory grows.

vLLM sleeps on CUDA alone; the torch engine, which only frees its keys and values, also on a CPU.
"""

import multiprocessing
import os
import resource
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Figures, lacks
from benchmarks.gpu.child import call
from benchmarks.gpu.engines import CONFIG, Setup, random_policy, setup_of
from benchmarks.gpu.loads import requests
from qurl_ray.weights.local import quantize_into

LIMIT_MIB = 256
"""Largest growth, on the device or the host, that is no leak: what stays of a cycle is far more after 200 of them."""
FORMAT = "int8"


def run(bench: Bench) -> None:
    for engine in ("vllm", "torch"):
        if engine == "vllm" and (reason := lacks("vllm") or (None if bench.cuda else "vLLM cannot sleep on a CPU")):
            bench.skip(engine, reason)
        elif figures := bench.attempt(engine, partial(measured, bench, engine)):
            bench.add(engine, figures, summary(figures))


def measured(bench: Bench, engine: str) -> Figures:
    with setup_of(
        bench,
        bench.scale.shapes[0],
        bench.scale.layers[0],
        engine=engine,
        format_name=FORMAT,
        graphs=bench.cuda,
        context=64,
        slots=8,
        sleeps=True,
    ) as setup:
        limit_s = 0.7 * bench.left_of_part()  # then it ends with fewer cycles; the rest is for its start
        return call(bench, repeated, setup=setup.plain(), cycles=bench.scale.cycles, limit_s=limit_s)


def repeated(*, setup: dict[str, Any], cycles: int, limit_s: float) -> Figures:
    """Return the seconds and the memory of each cycle. Runs in a process of its own."""
    made = Setup(**setup)
    engine = made.make()
    models = [random_policy(made.spec, version) for version in (1, 2)]
    load = partial(quantize_into, engine, quantization=FORMAT, config=CONFIG, unquantized=made.dtype)
    load(models[1])
    seconds: dict[str, list[float]] = {"sleep": [], "wake": [], "load": []}
    memory: dict[str, list[float]] = {"host": [], "device": []}
    ends = time.monotonic() + limit_s
    for cycle in range(cycles):
        for name, step in (("sleep", engine.sleep), ("wake", engine.wake), ("load", partial(load, models[cycle % 2]))):
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
        asked = requests(models[0].config.vocab_size, 1, 2)
        engine.generate(asked, version=1)
        memory["host"].append(host_mib())
        if made.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            memory["device"].append((total - free) / 2**20)
        if time.monotonic() > ends:
            break
    engine.close()
    growth = {where: grown(found) for where, found in memory.items() if found}
    return {
        "cycles": len(memory["host"]),
        "seconds": {name: statistics.median(found) for name, found in seconds.items()},
        "mib": {where: [round(value, 1) for value in found] for where, found in memory.items() if found},
        "growth_mib": growth,
        "grows": max(growth.values()) > LIMIT_MIB,
    }


def grown(found: list[float]) -> float:
    """Return by how much the last tenth exceeds the second one: in the first, libraries allocate what they keep."""
    tenth = max(1, len(found) // 10)
    return statistics.mean(found[-tenth:]) - statistics.mean(found[tenth : 2 * tenth] or found)


def host_mib() -> float:
    """Memory of this process and of those that vLLM has started."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * resource.getpagesize() / 2**20


def summary(figures: Figures) -> str:
    took = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in figures["seconds"].items())
    growth = ", ".join(f"{where} {value:+.0f} MiB" for where, value in figures["growth_mib"].items())
    return f"{'GROWS' if figures['grows'] else 'does not grow'} in {figures['cycles']} cycles ({growth}); {took}"
