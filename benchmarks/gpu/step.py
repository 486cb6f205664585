"""The learner's step on one GPU: forward, objective, backward, clipping and AdamW, of a few layers and the whole head.

One learner is timed twice, in bfloat16 autocast and through FP8 blocks, so that both have the same parameters. The time
of the whole model follows from the slope over layers. This does not say that it would fit into memory.
"""

import statistics
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, Figures, policy_of, ratio, whole
from qurl_ray.config.learner import LearnerConfig
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.learner.batching import plan
from qurl_ray.learner.flow import UnifiedFlow
from qurl_ray.learner.learner import make_learner
from qurl_ray.learner.protocol import StepResult
from qurl_ray.planning.shapes import Shape
from qurl_ray.policy.load import empty_model
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.units import units
from qurl_ray.rl.corrections import CorrectionSettings
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.types import Trajectory

PLAIN, FLOW = "bfloat16", "fp8_block"
ACR = ObjectiveSettings(
    clip_low=0.2, clip_high=0.28, correction=CorrectionSettings(weight="token", cap=2.0, adaptive_clip=True)
)


def run(bench: Bench) -> None:
    for shape in bench.scale.shapes:
        for kind in ("packed", "padded"):
            key, found = f"{shape.name}, {kind}", {}
            for layers in bench.scale.layers:
                one = bench.attempt(
                    f"{key}, {layers} layers", partial(measured, bench, shape, layers, kind == "packed")
                )
                if one:
                    found[layers] = one
            if found:
                figures = {"tokens": bench.scale.tokens, "measured": found} | extrapolated(bench, shape, found)
                bench.add(key, figures, summary(figures))


def measured(bench: Bench, shape: Shape, layers: int, packing: bool) -> Figures:
    bench.free()
    with policy_of(shape, layers, shape.vocab) as spec, bench.device:
        model = empty_model(spec)
    names = units(model, QuantizationConfig().keep)
    flow = UnifiedFlow(fmt=FORMATS[FLOW], quantized=names, backward="quantized")
    config = LearnerConfig(device=bench.device.type, compute="bfloat16", packing=packing)
    learner = make_learner(model, config, ACR, temperature=1.0, total_updates=100, flow=flow)
    budget = bench.scale.tokens  # one micro-batch
    (batches,) = plan([samples(bench, shape)], updates=1, ranks=1, token_budget=budget, seed=0, packed=packing)
    last: dict[str, StepResult] = {}

    def plain() -> None:
        with learner._flow.full_precision():
            last[PLAIN] = learner.learn(batches)

    def through() -> None:
        last[FLOW] = learner.learn(batches)

    took = bench.take_turns({PLAIN: plain, FLOW: through})
    figures: Figures = {name: {"seconds": statistics.median(seconds)} for name, seconds in took.items()}
    for name, result in last.items():
        figures[name] |= {"grad_norm": result.grad_norm, "skipped_updates": result.skipped_updates}
    peak = torch.cuda.max_memory_allocated() / 2**30 if bench.cuda else None
    return figures | {"flow_is_times_as_fast": ratio(took[PLAIN], took[FLOW]), "peak_gib": peak}


def samples(bench: Bench, shape: Shape) -> list[Trajectory]:
    """Return random answers of one length to random prompts."""
    random = np.random.default_rng(0)
    length, prompt = bench.scale.sample, bench.scale.sample // 4
    ids = random.integers(shape.vocab, size=(bench.scale.tokens // length, length)).astype(np.int32)
    return [
        Trajectory(
            uid=f"0/{g}",
            prompt_ids=row[:prompt],
            token_ids=row[prompt:],
            logprobs=np.full(length - prompt, -np.log(shape.vocab), dtype=np.float32),
            reward=float(g % 2),
            advantage=float(g % 2 * 2 - 1),
            versions=np.zeros(length - prompt, dtype=np.int32),
        )
        for g, row in enumerate(ids)
    ]


def extrapolated(bench: Bench, shape: Shape, found: dict[int, Figures]) -> Figures:
    """Return the figures extrapolated to all layers; nothing if one of the measurements is missing."""
    if len(found) < len(bench.scale.layers):
        return {}
    took = {name: [one[name]["seconds"] for one in found.values()] for name in (PLAIN, FLOW)}
    seconds = {name: whole(few, more, bench.scale.layers, shape) for name, (few, more) in took.items()}
    return {
        "layers": shape.layers,
        "extrapolated_seconds": seconds,
        "extrapolated_tokens_per_second": {name: bench.scale.tokens / value for name, value in seconds.items()},
    }


def summary(figures: Figures) -> str:
    parts = [
        f"{layers} layers: {1000 * one[PLAIN]['seconds']:.0f} ms, flow ×{one['flow_is_times_as_fast']:.2f}"
        for layers, one in figures["measured"].items()
    ]
    for name, speed in figures.get("extrapolated_tokens_per_second", {}).items():
        parts.append(f"{name} {speed:.0f} tokens/s with all {figures['layers']}, extrapolated")
    return "; ".join(parts)
