"""Compare the formulas with published measurements. The constants are fitted only to the rows that say so.

Values that a source does not give are the same for all sources: the mean answer has a quarter of its limit's tokens. If
the limit is unknown, too, an engine draws 128 answers of up to 8192 tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from qurl_ray.planning.machines import GPUS, SOURCES, Precision
from qurl_ray.planning.memory import kv_room
from qurl_ray.planning.shapes import SHAPES
from qurl_ray.planning.speed import EngineRoofline, learn_s, rollout_s
from qurl_ray.planning.workload import Workload

NAMED = SOURCES | {
    "QuRL": "arXiv 2602.13953",
    "Jet-RL": "arXiv 2601.14243; the sizes to which the ends of its ranges belong are from reviews of it",
    "verl": "verl, docs/advance/fp8.md: Qwen3-8B, 8 H100, 96 × 16 answers of up to 20K tokens",
    "FP8-RL": "arXiv 2601.18150, its figures as a public note on it has them; taken to be verl's setting",
    "NeMo": "NeMo-RL, docs/fp8.md with examples/configs/grpo_math_8B.yaml; +KV: NVIDIA's blog of 2026-04-20",
    "FlashRL": "fengyao.notion.site/flash-rl; the recipe's prompts, three times as many as it trains on, from verl",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A published figure, or a range of it, and the planner's prediction."""

    source: str
    what: str
    unit: Literal["×", "ms", "tokens", "tokens/s", "share"]
    low: float
    high: float
    predict: Callable[[], float]
    fitted: bool = False
    """True if this figure was used to choose the constants."""

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def error(self) -> float:
        """Error of the prediction, relative to the middle of the range."""
        return self.predict() / self.middle - 1


def engine(model: str, gpu: str, precision: Precision, width: int = 1, kv_bytes: float = 2) -> EngineRoofline:
    return EngineRoofline(
        shape=SHAPES[model], gpu=GPUS[gpu], precision=precision, tensor_parallel=width, kv_bytes=kv_bytes
    )


SHARE, ANSWERS = 0.25, 128
"""Mean length over limit, and answers per engine, for sources that do not give them."""


def _works() -> dict[str, Workload]:
    """Return the workloads of the sources, by name."""

    def work(prompts: int, samples: int, response: int, **more: float) -> Workload:
        common: dict[str, Any] = {
            "prompts": prompts,
            "samples": samples,
            "response": response,
            "mean": SHARE * response,
            "slots": 256,
        }
        return Workload(**(common | {"updates": 1, "micro_tokens": response} | more))

    return {
        "unsaid": work(ANSWERS // 8, 8, 8192),
        "jet_rl": work(128, 8, 8192),
        "verl": work(96, 16, 20480),
        "nemo": work(64, 32, 4096, updates=4),
        "dapo": work(512, 16, 20480, updates=16, kept=1 / 3),
    }


def _rollouts(work: Workload, model: str, gpu: str, precision: Precision, width: int = 1, kv: float = 2) -> float:
    """Speedup over bf16 of one engine that draws all answers of the workload."""
    both = [engine(model, gpu, "bf16", width), engine(model, gpu, precision, width, kv)]
    before, after = (rollout_s(each, work, work.drawn, work.slots, kv_room(each)) for each in both)
    return before / after


def _eighth(work: Workload) -> Workload:
    """Return the part of a workload that one of eight engines draws."""
    return replace(work, prompts=work.prompts // 8)


def _learning(model: str, work: Workload, fp8: bool) -> float:
    return learn_s(SHAPES[model], GPUS["h100"], work, ranks=8, stage=3, fp8=fp8)


def _training(model: str, work: Workload) -> float:
    """Speedup of the learner in FP8."""
    return _learning(model, work, False) / _learning(model, work, True)


def _whole_step(model: str, work: Workload, kv: float = 2) -> float:
    """Speedup of a step with rollouts and learner in FP8, which take turns on 8 GPUs."""
    own, drawing = _eighth(work), engine(model, "h100", "bf16")
    rollout = rollout_s(drawing, own, own.drawn, own.slots, kv_room(drawing))
    after = rollout / _rollouts(own, model, "h100", "fp8", kv=kv) + _learning(model, work, True)
    return (rollout + _learning(model, work, False)) / after


def _share(work: Workload) -> float:
    """Share of rollouts in a step of a 32B model on 128 GPUs, with 4 GPUs per engine."""
    drawing = engine("Qwen2.5-32B", "h100", "bf16", 4)
    rollout = rollout_s(drawing, work, work.drawn / 32, work.slots, kv_room(drawing))
    return rollout / (rollout + learn_s(drawing.shape, drawing.gpu, work, ranks=128, stage=3))


def _trained() -> float:
    """Tokens per second of each GPU when 8 GPUs pre-train on sequences of 8192 tokens."""
    work = Workload(
        prompts=16, samples=1, prompt=1, response=8191, mean=8191, updates=1, micro_tokens=16384, checkpointing=False
    )
    return work.tokens / 8 / learn_s(SHAPES["Llama-3.1-8B"], GPUS["h100"], work, ranks=8, stage=3)


# Median times between tokens, in ms, by format, tokens of context (prompt and half the answer), and sequences.
_BETWEEN_TOKENS: dict[tuple[Precision, int], dict[int, float]] = {
    ("bf16", 640): {1: 6.858, 4: 7.009, 16: 7.530, 32: 8.110, 64: 9.494, 128: 12.004, 256: 18.084},
    ("bf16", 3072): {1: 6.998, 4: 7.527, 16: 9.464, 32: 11.865, 40: 13.250, 48: 14.574, 64: 17.053},
    ("bf16", 8448): {1: 7.301, 4: 8.617, 7: 10.182, 10: 11.779, 16: 13.755},
    ("fp8", 640): {1: 4.662, 4: 4.815, 16: 5.251, 32: 6.032, 64: 7.260, 128: 10.159, 256: 16.129},
    ("fp8", 3072): {1: 4.796, 4: 5.319, 16: 7.217, 32: 9.811, 48: 12.252, 64: 14.806},
    ("fp8", 8448): {1: 5.104, 4: 6.425, 10: 9.506, 13: 10.238, 16: 11.431},
}


def fitted_points() -> list[Point]:
    """Return all decode steps to which the constants of `Constants` were fitted."""
    return [
        Point(
            source="S",
            what=f"decode step, {precision}, {sequences} × {context} tokens",
            unit="ms",
            low=measured,
            high=measured,
            predict=partial(_between_tokens_ms, precision, sequences, context),
            fitted=True,
        )
        for (precision, context), row in _BETWEEN_TOKENS.items()
        for sequences, measured in row.items()
    ]


def _between_tokens_ms(precision: Precision, sequences: int, context: int) -> float:
    return 1e3 * engine("Qwen3-8B", "h100", precision).decode_s(sequences, context)


def _kv_tokens(precision: Precision) -> float:
    one = engine("Qwen3-8B", "h100", precision)
    return kv_room(one) / one.shape.kv_bytes(1)


def points() -> list[Point]:
    """Return the published figures, one point for each row."""
    works = _works()
    unsaid, jet_rl, verl, nemo = works["unsaid"], works["jet_rl"], works["verl"], works["nemo"]
    own = _eighth(verl)

    def point(source: str, what: str, low: float, high: float, predict: Callable[[], float], **kind) -> Point:
        return Point(source=source, what=what, low=low, high=high, predict=predict, **({"unit": "×"} | kind))

    def qurl(what: str, low: float, high: float, model: str, gpu: str, width: int = 1) -> Point:
        return point("QuRL", f"rollouts int8, {what}", low, high, lambda: _rollouts(unsaid, model, gpu, "int8", width))

    fit = {"fitted": True}
    return [
        point("S", "KV cache, bf16", 377_024, 377_024, lambda: _kv_tokens("bf16"), unit="tokens", **fit),
        point("S", "KV cache, fp8", 430_272, 430_272, lambda: _kv_tokens("fp8"), unit="tokens", **fit),
        point("T", "pre-training, each GPU", 5762, 6667, _trained, unit="tokens/s", **fit),
        qurl("7B, H100", 1.2, 1.3, "Qwen2.5-7B", "h100"),
        qurl("7B, A100", 1.2, 1.3, "Qwen2.5-7B", "a100"),
        qurl("14B, H100", 1.3, 1.56, "Qwen2.5-14B", "h100"),
        qurl("14B, A100", 1.3, 1.56, "Qwen2.5-14B", "a100"),
        qurl("32B, 2 A100", 1.7, 1.7, "Qwen2.5-32B", "a100", 2),
        qurl("32B, 2 H100", 1.83, 1.83, "Qwen2.5-32B", "h100", 2),
        point("Jet-RL", "rollouts fp8, 8B", 1.07, 1.33, lambda: _rollouts(unsaid, "Qwen3-8B", "h100", "fp8")),
        point("Jet-RL", "rollouts fp8, 32B", 1.33, 1.33, lambda: _rollouts(unsaid, "Qwen3-32B", "h100", "fp8", 2)),
        point("Jet-RL", "training fp8, 8B", 1.41, 1.41, lambda: _training("Qwen3-8B", jet_rl)),
        point("Jet-RL", "step, all fp8, 8B", 1.16, 1.16, lambda: _whole_step("Qwen3-8B", jet_rl)),
        point("verl", "rollouts fp8, 8B", 1.12, 1.18, lambda: _rollouts(own, "Qwen3-8B", "h100", "fp8")),
        point("FP8-RL", "rollouts fp8, 8B", 1.1, 1.2, lambda: _rollouts(own, "Qwen3-8B", "h100", "fp8")),
        point("FP8-RL", "rollouts, fp8 KV alone", 1.38, 1.38, lambda: _rollouts(own, "Qwen3-8B", "h100", "bf16", kv=1)),
        point(
            "FP8-RL", "rollouts, fp8 and fp8 KV", 1.44, 1.44, lambda: _rollouts(own, "Qwen3-8B", "h100", "fp8", kv=1)
        ),
        point("NeMo", "step, all fp8, Llama 8B", 1.15, 1.25, lambda: _whole_step("Llama-3.1-8B", nemo)),
        point("NeMo", "step, all fp8 and fp8 KV, 8B", 1.48, 1.48, lambda: _whole_step("Qwen3-8B", verl, kv=1)),
        point("FlashRL", "rollouts' share of DAPO-32B", 0.7, 0.7, lambda: _share(works["dapo"]), unit="share"),
    ]
