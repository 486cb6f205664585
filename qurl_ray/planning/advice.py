"""Conclusions from a plan: a verdict in words, recommended settings, and notes.

Every speedup is followed by its sources (planning.published, planning.measured) and the mark of what was not measured.
"""

from dataclasses import dataclass

from qurl_ray.planning.machines import EIGHT_BIT
from qurl_ray.planning.measured import measured_card
from qurl_ray.planning.memory import Stage
from qurl_ray.planning.plan import PAYS, Plan, StepEstimate

MARK = "*"
"""Follows what is computed, not timed as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Sources of a plan's speeds, with the mark: "[S]*" from other software, "[H200]*" from what this card measured."""

    rollouts: str
    learner: str
    step: str


def marks(plan: Plan) -> Marks:
    """Return the sources of the speeds of rollouts, of the learner and of a step."""
    cards = [estimate.engine.card for estimate in plan.best.values() if estimate]
    rollouts = sorted({card.name.upper() if card else "S" for card in cards})
    card = measured_card(plan.shape, plan.gpu)
    learner = card.name.upper() if card else "T"
    both = sorted({*rollouts, learner})
    return Marks(rollouts=_mark(rollouts), learner=_mark([learner]), step=_mark(both))


def _mark(sources: list[str]) -> str:
    return f"[{', '.join(sources)}]{MARK}"


def verdict(plan: Plan) -> str:
    """Return a text that says whether quantization pays, and why."""
    base, of = plan.best["bf16"], marks(plan)
    if base is None:
        return f"Quantization pays: in bf16 nothing fits on these GPUs, in {plan.chosen} it does."
    better = max(EIGHT_BIT, key=lambda name: plan.gain(name) or 0)
    took = f"{base.share:.0%} of a step"
    if base.overlapped:
        took = f"{base.rollout:,.0f} s beside the learner's {base.learn:,.0f}"
    found = f"In bf16's layout rollouts, {took}, become {plan.rollout_gain(better) or 1:.2f}× {of.rollouts}"
    if plan.chosen != "bf16":
        other = plan.best[plan.chosen]
        learner = (
            f", the learner {base.learn / other.learn:.2f}× {of.learner}" if plan.work.fp8_learner and other else ""
        )
        gain = f"{plan.gain(plan.chosen):.2f}× {of.step} with {plan.chosen}"
        sync = f", syncs {base.sync:.1f} → {other.sync:.1f} s [C]{MARK}" if other else ""
        return f"Quantization pays: {gain}. {found}{learner}{sync}; {_reason(plan, base, 'weights and products')}."
    times = plan.gain(better) or 1
    digits = 2 if f"{times:.2f}" != f"{PAYS:.2f}" else 4
    gain = f"{times:.{digits}f}× {of.step}, less than {PAYS}×"
    return f"Quantization does not pay here: {gain}. {found}; {_reason(plan, base)}."


def _reason(plan: Plan, base: StepEstimate, part: str | None = None) -> str:
    """Return a clause on the share of a full bf16 decode step that `part`, by default the largest part, takes."""
    parts = base.engine.parts(base.batch, plan.work.prompt + plan.work.age)
    part = part or max(parts, key=lambda name: parts[name])
    share = f"{parts[part] / sum(parts.values()):.0%} of a full decode step"
    if part == "keys and values":
        gain = f"{plan.rollout_gain('fp8', 1) or 1:.2f}× {marks(plan).rollouts}"
        rest = f"with those in FP8 too rollouts would become {gain}"
        return f"{share} reads keys and values, which stay as they are ({rest})"
    if part == "overhead":
        return f"{share} is launches, sampling and all-reduces, which no format shortens"
    return f"{share} reads and multiplies weights, more of it as the batch drains"


def recommended(plan: Plan) -> list[str]:
    """Return the chosen layout as `key=value` settings of a run."""
    estimate = plan.best[plan.chosen]
    if estimate is None:
        return []
    layout, work, asked = estimate.layout, estimate.work, plan.work
    # In one flow of training and rollouts, a GPU has FP8 in blocks alone.
    chosen = "fp8_block" if plan.chosen == "fp8" and asked.fp8_learner else plan.chosen
    precision = ["quantization=none", "uaq_scale=1"] if chosen == "bf16" else [f"quantization={chosen}"]
    colocated = layout.placement == "colocated"
    kv = int(estimate.room / layout.tensor_parallel / 2**30)
    return [
        f"placement={layout.placement}",
        f"rollout.engine={asked.engine}",
        "rollout.device=cuda",
        "learner.device=cuda",
        f"rollout.{precision[0]}",
        *(f"quantization.{setting}" for setting in precision[1:]),
        f"rollout.workers={layout.engines}",
        f"rollout.vllm.tensor_parallel={layout.tensor_parallel}",
        *([f"rollout.vllm.kv_cache_gb={kv}"] if colocated else []),
        f"learner.workers={layout.ranks}",
        *(["learner.backend=fsdp"] if layout.stage == "fsdp" else _zero(layout.stage)),
        *(f"{setting}={new}" for name, setting in _SEARCHED if (new := getattr(work, name)) != getattr(asked, name)),
        *(["learner.offload_while_waiting=false"] if colocated and layout.stage == 0 else []),
    ]


_SEARCHED = (
    ("transport", "sync.transport"),
    ("sequence_parallel", "learner.sequence_parallel"),
    ("micro_tokens", "learner.tokens_per_micro_batch"),
)
"""Fields of the workload that the search may change, and their settings."""


def _zero(stage: Stage) -> list[str]:
    return ["learner.backend=deepspeed", f"learner.zero_stage={stage}"]


def notes(plan: Plan) -> list[str]:
    """Return remarks on the chosen layout: idle engines, and answers that wait for memory."""
    found = []
    chosen, drawn = plan.best[plan.chosen], plan.work.rounds[0]
    if chosen and chosen.layout.engines > drawn:
        idle = chosen.layout.engines - int(drawn)
        found.append(f"{chosen.layout.engines:,} engines draw {drawn:,.0f} answers: {idle:,} have nothing to do")
    if chosen and chosen.slots < min(plan.work.slots, drawn / chosen.layout.engines):
        found.append(f"an engine has room for {chosen.slots} answers at a time, and others wait")
    return found
