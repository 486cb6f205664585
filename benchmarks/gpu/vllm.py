"""Speed of vLLM: decode steps by format and batch, of whole models, captured as CUDA graphs and launched one by one.

Each engine is made in a process of its own, gets random weights there, and draws answers of one token and of some more
to equal prompts, which are in its cache. A step takes the difference of the two, divided by the steps. Engines do not
take turns, as a GPU seldom holds two of them: compare figures of one hour.
"""

import statistics
import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.bench import Bench, Figures, lacks
from benchmarks.gpu.child import call
from benchmarks.gpu.engines import Setup, setup_of
from qurl_ray.planning.shapes import Shape
from qurl_ray.rollout import vllm_engine
from qurl_ray.types import Request, SamplingParams


def run(bench: Bench) -> None:
    if reason := lacks("vllm"):
        bench.skip("all of it", reason)
        return
    if not bench.cuda:
        bench.skip("graphs", "a CPU has no CUDA graphs")
    for shape in bench.scale.shapes[: bench.scale.whole]:
        for way in ("graphs", "eager") if bench.cuda else ("eager",):
            for name in bench.scale.formats:
                key = f"{shape.name}, {way}, {name}"
                if figures := bench.attempt(key, partial(measured, bench, shape, way, name)):
                    bench.add(key, figures, summary(figures))


def measured(bench: Bench, shape: Shape, way: str, name: str) -> Figures:
    scale = bench.scale
    with setup_of(
        bench,
        shape,
        shape.layers,
        engine="vllm",
        format_name=name,
        graphs=way == "graphs",
        context=scale.prompt + scale.vllm_steps + 1,
        slots=max(scale.vllm_batches),
        vocabulary=shape.vocab,
    ) as setup:
        found = call(
            bench,
            decode,
            setup=setup.plain(),
            batches=scale.vllm_batches,
            prompt=scale.prompt,
            steps=scale.vllm_steps,
            rounds=scale.rounds,
        )
    plain = found if name == "none" else bench.figures["vllm"].get(f"{shape.name}, {way}, none")
    for count, one in found["batches"].items() if plain else ():
        one["times_as_fast"] = plain["batches"][count]["ms"] / one["ms"]
    return found


def decode(*, setup: dict[str, Any], batches: list[int], prompt: int, steps: int, rounds: int) -> Figures:
    """Return milliseconds of a decode step and tokens per second, by batch. Runs in a process of its own."""
    measuring()
    made = Setup(**setup)
    started = time.perf_counter()
    engine = made.make()
    start_s = time.perf_counter() - started
    randomize(engine, made.format_name)
    found: Figures = {}
    for count in batches:
        turn = partial(seconds, engine, count, prompt)
        turn(1), turn(1 + steps)
        differences = [turn(1 + steps) - turn(1) for _ in range(rounds)]
        ms = max(1e-6, 1000 * statistics.median(differences) / steps)
        found[str(count)] = {"ms": ms, "tokens_per_second": 1000 * count / ms}
    kernels = engine.kernels()
    engine.close()
    return {"start_seconds": start_s, "kernels": kernels, "batches": found}


def randomize(engine: Any, format_name: str) -> None:
    """Write random weights where a sync would, which it does not have to carry: only speed is measured."""
    ask(engine, "randomize", format_name, engine.weight_max_code(format_name))
    engine.version = 1


def measuring() -> None:
    """Have vLLM's workers know the methods of benchmarks.gpu.in_worker."""
    vllm_engine.EXTENSION = "benchmarks.gpu.in_worker.Measuring"


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
        parts.append(f"batch {count} {one['ms']:.2f} ms{speed}")
    return f"{'; '.join(parts)}; started in {figures['start_seconds']:.0f} s"
