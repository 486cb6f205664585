"""Speed of the torch engine: decode steps by format and batch, launched one by one and as CUDA graphs.

Engines have a few layers and a small vocabulary, because a sync checks every byte on the CPU. The whole vocabulary
takes longer in the product with the head and in the draw; this additional time is measured beside them. The time of a
step of the whole model is that of the few layers, plus the slope over layers for the others, plus the additional time
of the head.
"""

import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.nn.functional import linear

from benchmarks.gpu.bench import VOCABULARY, Bench, Call, Figures, policy_of, ratio, whole
from benchmarks.gpu.roofline import gpu_named, limit_ms
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.engines.torch.batch import RunningBatch
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.engines.torch.graphs import Capture, CudaCapture
from qurl_ray.engines.torch.sampling import noise_keys, sample
from qurl_ray.planning.shapes import Shape
from qurl_ray.types import Request, SamplingParams
from qurl_ray.weights.local import quantize_into

FORMATS = ("none", "int8", "fp8", "fp8_block")


Engines = dict[int, TorchEngine]
"""Engines of one format, by their number of layers."""


def run(bench: Bench) -> None:
    ways = {"eager": None, "graphs": CudaCapture} if bench.cuda else {"eager": None}
    for shape in bench.scale.shapes:
        for way, capture in ways.items():
            bench.attempt(f"{shape.name}, {way}", partial(measure, bench, shape, way, capture))


def measure(bench: Bench, shape: Shape, way: str, capture: Callable[[], Capture] | None) -> None:
    """Measure all formats side by side, batch after batch; small ones first, as a large enough cache is kept."""
    bench.free()
    made: dict[str, Engines] = {}
    for name in FORMATS:
        pair = bench.attempt(f"{shape.name}, {way}, {name}", partial(engines, bench, shape, name, capture))
        if pair:
            made[name] = pair
    for count in bench.scale.batches:
        key, calls = f"{shape.name}, {way}, batch {count}", {}
        for name, pair in made.items():
            calls |= bench.attempt(f"{key}, {name}", partial(turns, bench, name, pair, count)) or {}
        if calls and (figures := bench.attempt(key, partial(timed, bench, shape, count, calls))):
            for name, one in figures["formats"].items():
                one["kernels"] = made[name][bench.scale.layers[0]].kernels()
            bench.add(key, figures, summary(figures))


def engines(bench: Bench, shape: Shape, name: str, capture: Callable[[], Capture] | None) -> Engines:
    """Return engines with random weights in this format, as a sync leaves them."""
    made: Engines = {}
    for layers in bench.scale.layers:
        with policy_of(shape, layers, min(VOCABULARY, shape.vocab)) as spec:
            one = TorchEngine(
                spec, slots=max(bench.scale.batches), device=str(bench.device), dtype=bench.dtype, capture=capture
            )
        unquantized = "bfloat16" if bench.dtype == torch.bfloat16 else "float32"
        quantize_into(one, one._model, name, QuantizationConfig(equalize=False), unquantized=unquantized)
        made[layers] = one
    return made


def turns(bench: Bench, name: str, pair: Engines, count: int) -> dict[tuple[str, int], Call]:
    """Return calls that make some decode steps of `count` sequences, by (format, layers)."""
    return {(name, layers): endless(bench, one, count) for layers, one in pair.items()}


def endless(bench: Bench, one: TorchEngine, count: int) -> Call:
    """Return a call that makes decode steps of a batch that never ends; its equal prompts are already in the cache."""
    answer = bench.scale.steps * (bench.scale.rounds + 1) + 3  # a turn to warm up, two draws here, and one to spare
    prompt = np.arange(bench.scale.prompt, dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=answer, ignore_eos=True)
    asked = [Request(uid=str(i), prompt_ids=prompt, seed=i, sampling=sampling) for i in range(count)]
    one.reserve(count, bench.scale.prompt + answer)
    batch = RunningBatch(asked, version=1)
    one.step(batch, list(enumerate(asked)))

    def turn() -> None:
        for _ in range(bench.scale.steps):
            one.step(batch, [])
        assert batch.count == count

    return turn


def timed(bench: Bench, shape: Shape, count: int, calls: dict[tuple[str, int], Call]) -> Figures:
    """Return milliseconds and tokens per second, measured, and extrapolated to all layers and the whole vocabulary."""
    steps, layers = bench.scale.steps, bench.scale.layers
    seconds = bench.take_turns(calls)
    took = {key: 1000 * statistics.median(each) / steps for key, each in seconds.items()}
    head = head_ms(bench, shape, count)
    found: Figures = {}
    for name in dict.fromkeys(name for name, _ in calls):
        few, more = (took[name, number] for number in layers)
        step = whole(few, more, layers, shape) + head
        found[name] = {
            "measured_ms": {str(number): took[name, number] for number in layers},
            "measured_tokens_per_second": {str(number): 1000 * count / took[name, number] for number in layers},
            "ms_per_layer": (more - few) / (layers[1] - layers[0]),
            "extrapolated_ms": step,
            "extrapolated_tokens_per_second": 1000 * count / step,
        }
        if gpu := gpu_named(bench.figures["machine"]["device"]):
            found[name]["limit_ms"] = sum(limit_ms(shape, gpu, name, count, bench.scale.prompt).values())
    for name, one in found.items() if "none" in found else ():
        one["measured_times_as_fast"] = ratio(seconds["none", layers[1]], seconds[name, layers[1]])
        one["extrapolated_times_as_fast"] = found["none"]["extrapolated_ms"] / one["extrapolated_ms"]
    own = {"layers": shape.layers, "head_ms": head, "dtype": str(bench.dtype).removeprefix("torch.")}
    return own | {"context": bench.scale.prompt, "formats": found}


@torch.inference_mode()
def head_ms(bench: Bench, shape: Shape, count: int) -> float:
    """Milliseconds that head product and draw take longer with the whole vocabulary than with the engines'."""
    new = partial(torch.randn, device=bench.device, dtype=bench.dtype)
    states_Bd = new(count, shape.hidden)
    keys_B = noise_keys(np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.int64))
    sizes = {min(VOCABULARY, shape.vocab), shape.vocab}
    heads = {size: 0.02 * new(size, shape.hidden) for size in sizes}

    def draw(size: int) -> None:
        tokens_B, logprobs_B = sample(linear(states_Bd, heads[size]), SamplingParams(), keys_B)
        tokens_B.cpu(), logprobs_B.cpu()  # like the engine, which waits for both

    took = bench.take_turns({size: partial(draw, size) for size in sizes})
    return 1000 * (statistics.median(took[max(sizes)]) - statistics.median(took[min(sizes)]))


def summary(figures: Figures) -> str:
    parts = []
    for name, one in figures["formats"].items():
        few = " and ".join(f"{ms:.2f} ms with {layers}" for layers, ms in one["measured_ms"].items())
        parts.append(f"{name} {few}, {one['extrapolated_tokens_per_second']:.0f} tokens/s with all")
    return "; ".join(parts) + f" of {figures['layers']} layers, extrapolated"
