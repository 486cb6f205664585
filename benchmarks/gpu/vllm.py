"""Speed of vLLM: decode steps by format and batch, of whole models, captured as CUDA graphs and launched one by one.

Each engine is made in a process of its own, gets random weights there, and draws answers of one token and of some more
to equal prompts, which are in its cache. A step takes the difference of the two, divided by the steps. As many engines
as the GPU holds start beside each other, since a start takes minutes; then each has the GPU for itself.
"""

import fcntl
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.bench import Bench, Figures, lacks
from benchmarks.gpu.child import call
from benchmarks.gpu.engines import CONFIG, Setup, setup_of
from benchmarks.gpu.roofline import add_limits
from qurl_ray.engines.vllm import engine as vllm_engine
from qurl_ray.planning.shapes import Shape
from qurl_ray.types import Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """An engine to be measured."""

    format_name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's settings, beside those of this package."""
    keep: tuple[str, ...] = CONFIG.keep

    @property
    def head_in_codes(self) -> bool:
        return self.keep != CONFIG.keep


VARIANTS = {
    "fp8, quantized by vLLM": Variant(
        format_name="fp8", options={"compilation_config": {"custom_ops": ["+quant_fp8"]}}
    ),
    "int8, quantized by vLLM": Variant(
        format_name="int8", options={"compilation_config": {"custom_ops": ["+quant_int8"]}}
    ),
    "fp8, with FP8 keys": Variant(format_name="fp8", options={"kv_cache_dtype": "fp8"}),
    "none, with FP8 keys": Variant(format_name="none", options={"kv_cache_dtype": "fp8"}),
    "fp8, head in codes": Variant(format_name="fp8", keep=("embed_tokens",)),
    "int8, head in codes": Variant(format_name="int8", keep=("embed_tokens",)),
}
"""Engines that a run does not have by default, by name."""
_LONGEST, _NAME = 12, 100  # operations of a step that are listed, and characters of their names
OTHER_GIB = 6
"""Memory of an engine beside weights and keys: its context, graphs, activations."""


def run(bench: Bench) -> None:
    if reason := lacks("vllm"):
        bench.skip("all of it", reason)
        return
    if not bench.cuda:
        bench.skip("graphs", "a CPU has no CUDA graphs")
    for shape in bench.scale.shapes[: bench.scale.whole]:
        for way in ("graphs", "eager") if bench.cuda else ("eager",):
            names = [*bench.scale.formats, *(variants(shape) if way == "graphs" else ())]
            left = [name for name in names if not bench.has(f"{shape.name}, {way}, {name}")]
            for at in range(0, len(left), count := at_once(bench, shape)):
                beside(bench, shape, way, left[at : at + count])


def variants(shape: Shape) -> list[str]:
    """Return the names of the variants of this shape: a head that is tied to the embedding is not in codes."""
    return [name for name, variant in VARIANTS.items() if not (shape.tied and variant.head_in_codes)]


def variant_of(name: str) -> Variant:
    """Return the variant of this name, or that of a format."""
    return VARIANTS.get(name) or Variant(format_name=name)


def at_once(bench: Bench, shape: Shape) -> int:
    """Return how many engines of this shape start beside each other: the GPU holds them, and each has four cores."""
    if not bench.cuda:
        return 1
    context = bench.scale.prompt + bench.scale.vllm_steps
    each_gib = (2 * shape.params + max(bench.scale.vllm_batches) * shape.kv_bytes(context)) / 2**30 + OTHER_GIB
    return max(1, min(int(0.9 * bench.figures["machine"]["gib"] / each_gib), (os.cpu_count() or 1) // 4))


def beside(bench: Bench, shape: Shape, way: str, names: Sequence[str]) -> None:
    """Measure engines of these formats, which start beside each other."""
    if not bench.left_of_part():
        for name in names:
            bench.skip(f"{shape.name}, {way}, {name}", "no time left")
        return
    with tempfile.TemporaryDirectory(prefix="qurl-kit-") as folder, ThreadPoolExecutor(len(names)) as pool:
        turns = [{"folder": folder, "name": name, "engines": len(names)} for name in names]
        found = [pool.submit(measured, bench, shape, way, turn) for turn in turns]
        for name, one in zip(names, found, strict=True):
            key = f"{shape.name}, {way}, {name}"
            if figures := bench.attempt(key, one.result):
                plain = figures if name == "none" else bench.figures["vllm"].get(f"{shape.name}, {way}, none")
                if plain:
                    compare(figures, plain)
                variant = variant_of(name)
                add_limits(
                    figures["batches"],
                    plain["batches"] if plain else {},
                    shape,
                    bench.figures["machine"]["device"],
                    variant.format_name,
                    context=bench.scale.prompt + bench.scale.vllm_steps // 2,
                    key_bytes=1 if "kv_cache_dtype" in variant.options else 2,
                    head_in_codes=variant.head_in_codes,
                )
                bench.add(key, figures, summary(figures))


def measured(bench: Bench, shape: Shape, way: str, turn: Figures) -> Figures:
    scale, variant = bench.scale, variant_of(turn["name"])
    with setup_of(
        bench,
        shape,
        shape.layers,
        engine="vllm",
        format_name=variant.format_name,
        graphs=way == "graphs",
        context=scale.prompt + scale.vllm_steps + 1,
        slots=max(scale.vllm_batches),
        vocabulary=shape.vocab,
        keep=variant.keep,
    ) as setup:
        try:
            return call(
                bench,
                decode,
                setup=setup.plain(),
                turn=turn,
                batches=scale.vllm_batches,
                prompt=scale.prompt,
                steps=scale.vllm_steps,
                rounds=scale.rounds,
            )
        finally:
            report_start(turn)  # if it could not start, the others do not wait for it


def compare(figures: Figures, plain: Figures) -> None:
    """Add how many times as fast as in full precision it is."""
    for count, one in figures["batches"].items():
        one["times_as_fast"] = plain["batches"][count]["ms"] / one["ms"]


def report_start(turn: Figures) -> None:
    """Tell the engines of the same shape that this one does not keep them waiting."""
    Path(turn["folder"], f"{turn['name']}.started").touch()


@contextmanager
def alone(turn: Figures) -> Iterator[None]:
    """Wait until all engines have started and none of the others is measured."""
    report_start(turn)
    folder = Path(turn["folder"])
    while len(list(folder.glob("*.started"))) < turn["engines"]:
        time.sleep(0.1)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def decode(
    *, setup: dict[str, Any], turn: Figures, batches: list[int], prompt: int, steps: int, rounds: int
) -> Figures:
    """Return milliseconds of a decode step and tokens per second, by batch. Runs in a process of its own."""
    measuring()
    made = Setup(**setup)
    with_options(variant_of(turn["name"]).options)
    started = time.perf_counter()
    engine = made.make()
    start_s = time.perf_counter() - started
    randomize(engine, made.format_name)
    found: Figures = {}
    with alone(turn):
        for count in batches:
            draw = partial(seconds, engine, count, prompt)
            draw(1), draw(1 + steps)
            differences = [draw(1 + steps) - draw(1) for _ in range(rounds)]
            ms = max(1e-6, 1000 * statistics.median(differences) / steps)
            found[str(count)] = {"ms": ms, "tokens_per_second": 1000 * count / ms}
            if made.device == "cuda":
                found[str(count)]["on_the_gpu_ms"] = on_the_gpu(engine, partial(draw, 1 + steps), steps)
    kernels = engine.kernels()
    engine.close()
    return {"start_seconds": start_s, "kernels": kernels, "batches": found}


def on_the_gpu(engine: Any, draw: Callable[[], float], steps: int) -> dict[str, float]:
    """Return the milliseconds of a step on the GPU, of all operations and of the longest ones by name."""
    ask(engine, "profile_start")
    draw()
    each = [(name, ms / steps) for name, ms, _ in ask(engine, "profile_stop")]
    return {"all": sum(ms for _, ms in each), **{name[:_NAME]: ms for name, ms in each[:_LONGEST]}}


def randomize(engine: Any, format_name: str) -> None:
    """Write random weights where a sync would, which it does not have to carry: only speed is measured."""
    ask(engine, "randomize", format_name, engine.weight_max_code(format_name))
    engine.version = 1


def measuring() -> None:
    """Have vLLM's workers know the methods of benchmarks.gpu.in_worker."""
    vllm_engine.EXTENSION = "benchmarks.gpu.in_worker.Measuring"


def with_options(options: Mapping[str, Any]) -> None:
    """Have vLLM's engines of this process start with these settings beside their own."""
    start = vllm_engine.VllmServer

    def started(settings: dict[str, Any], **others: Any) -> Any:
        return start({**settings, **options}, **others)

    vllm_engine.VllmServer = started  # type: ignore[assignment, misc]


def ask(engine: Any, method: str, *arguments: object) -> Any:
    """Return the result of a method of benchmarks.gpu.in_worker in vLLM's only worker."""
    return engine._server.control("collective_rpc", f"qurl_{method}", args=arguments)[0]


def seconds(engine: Any, count: int, prompt: int, tokens: int) -> float:
    """Return the seconds of `count` answers of so many tokens."""
    ids = np.arange(prompt, dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    asked = [Request(uid=str(i), prompt_ids=ids, seed=i, sampling=sampling) for i in range(count)]
    started = time.perf_counter()
    drawn = engine.generate(asked, version=1)
    assert all(len(answer.token_ids) == tokens for answer in drawn)
    return time.perf_counter() - started


def summary(figures: Figures) -> str:
    parts = []
    for count, one in figures["batches"].items():
        speed = f", ×{one['times_as_fast']:.2f}" if "times_as_fast" in one else ""
        limit = f", {one['limit_ms']['all']:.2f} at best" if "limit_ms" in one else ""
        parts.append(f"batch {count} {one['ms']:.2f} ms{speed}{limit}")
    return f"{'; '.join(parts)}; started in {figures['start_seconds']:.0f} s"
