"""Show a plan: a table, a verdict in words and recommended settings for people, and plain values for programs.

Every speedup is followed by its sources (machines.SOURCES, planning.measured) and the mark of what was not measured.
"""

from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from qurl_ray.planning.machines import EIGHT_BIT, PRECISIONS, SOURCES, Precision
from qurl_ray.planning.measured import measured_card
from qurl_ray.planning.memory import Footprint, weights_bytes
from qurl_ray.planning.plan import PAYS, RESOLVED_S, SEARCHED, Plan, StepEstimate, sharding
from qurl_ray.planning.sync import delta_bytes, sent_bytes, sync_s
from qurl_ray.planning.workload import TransportName

MARK = "*"
"""Follows what is computed, not timed as a whole."""


# --- values ------------------------------------------------------------------------------------------------------


def as_values(plan: Plan, check: Footprint | None = None) -> dict[str, Any]:
    """Return everything that `show` shows, and the workload's settings, in seconds, bytes and ratios."""
    work = asdict(plan.work) | {"mean": plan.work.answer}
    card = measured_card(plan.shape, plan.gpu)
    return {
        "model": plan.shape.name,
        "parameters": plan.shape.params,
        "gpu": plan.gpu.name,
        "gpus": plan.gpus,
        "work": {name: value for name, value in work.items() if name not in SEARCHED},  # each format has its own
        "formats": {name: _values(plan, name, estimate) for name, estimate in plan.best.items()},
        "recommended": plan.chosen if plan.resolved else None,
        "settings": recommended(plan),
        "quantization_pays": plan.chosen != "bf16" if plan.resolved else None,
        "verdict": verdict(plan),
        "measured": asdict(card) if card else None,
        "legend": _legend(plan),
        "check": check and {name: getattr(check, name) for name in ("gpu", "host", "slots", "problems")},
    }


def _values(plan: Plan, precision: Precision, estimate: StepEstimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    layout, memory, work = estimate.layout, estimate.memory, estimate.work
    return {
        "placement": layout.placement,
        "engines": layout.engines,
        "tensor_parallel": layout.tensor_parallel,
        "learner_gpus": layout.ranks,
        "stage": layout.stage,
        "sequence_parallel": work.sequence_parallel,
        "micro_tokens": work.micro_tokens,
        "transport": work.transport,
        "kv_slots": memory.slots,
        "kv_bytes_per_gpu": memory.room / layout.tensor_parallel,
        "weights_bytes_per_gpu": weights_bytes(estimate.engine),
        "bytes_per_gpu": memory.gpu,
        "host_bytes": memory.host,
        "tokens_per_s": estimate.tokens_per_s,
        "rollout_s": estimate.rollout,
        "learn_s": estimate.learn,
        "sync_s": estimate.sync,
        "turns_s": estimate.turns,
        "step_s": estimate.step,
        "rollout_share": estimate.share,
        "sync": _syncs(estimate),
        "rollout_gain": plan.rollout_gain(precision) if plan.resolved else None,
        "step_gain": plan.gain(precision) if plan.resolved else None,
    }


def _syncs(estimate: StepEstimate) -> dict[str, Any]:
    """Return bytes of a sync, and its seconds by each transport that the placement allows."""
    engine, work = estimate.engine, estimate.work
    direct: TransportName = "ipc" if estimate.layout.colocated else "nccl"
    variants = {
        "full": replace(work, transport="object_store", delta=False),
        "delta": replace(work, transport="object_store", delta=True),
        direct: replace(work, transport=direct),
    }
    return {
        "full_bytes": sent_bytes(engine.shape, engine.precision, work),
        "delta_bytes": delta_bytes(engine.shape),
        "direct": direct,
        "seconds": {name: sync_s(engine, estimate.layout, variant) for name, variant in variants.items()},
    }


# --- words -------------------------------------------------------------------------------------------------------


def marks(plan: Plan) -> dict[str, str]:
    """Return the sources of the speeds of rollouts, learner and step, with MARK: "[S]*" from other software, "[H200]*"
    from what this card measured."""
    if card := measured_card(plan.shape, plan.gpu):
        return dict.fromkeys(("rollouts", "learner", "step"), f"[{card.name.upper()}]{MARK}")
    return {"rollouts": f"[S]{MARK}", "learner": f"[T]{MARK}", "step": f"[S, T]{MARK}"}


def verdict(plan: Plan) -> str:
    """Return a text that says whether quantization pays, and why."""
    base, other, mark = plan.best["bf16"], plan.best[plan.chosen], marks(plan)
    if base is None or other is None:
        return f"Quantization pays: in bf16 nothing fits on these GPUs, in {plan.chosen} it does."
    if not plan.resolved:
        return (
            f"Quantization is not judged: a step of {figure(base.step)} s {mark['step']} is below the {RESOLVED_S:g} s "
            "from which a plan can tell formats apart. Run some steps in each format, and compare their time by phase."
        )
    better = max(EIGHT_BIT, key=lambda name: plan.gain(name) or 0)
    took = f"{base.share:.0%} of a step"
    if base.overlapped:
        took = f"{base.rollout:,.0f} s beside the learner's {base.learn:,.0f}"
    rollouts = f"In bf16's layout rollouts, {took}, become {plan.rollout_gain(better) or 1:.2f}× {mark['rollouts']}"
    times = plan.gain(better) or 1
    if plan.chosen == "bf16":
        digits = 2 if f"{times:.2f}" != f"{PAYS:.2f}" else 4
        gain = f"{times:.{digits}f}× {mark['step']}, less than {PAYS}×"
        return f"Quantization does not pay here: {gain}. {rollouts}; {_reason(plan, base)}."
    learner, sync = "", ""
    if plan.work.fp8_learner:
        learner = f", the learner {base.learn / other.learn:.2f}× {mark['learner']}"
    if f"{base.sync:.1f}" != f"{other.sync:.1f}":
        sync = f", syncs {base.sync:.1f} → {other.sync:.1f} s [C]{MARK}"
    gain = f"{plan.gain(plan.chosen):.2f}× {mark['step']} with {plan.chosen}"
    return f"Quantization pays: {gain}. {rollouts}{learner}{sync}; {_reason(plan, base, 'weights and products')}."


def _reason(plan: Plan, base: StepEstimate, part: str | None = None) -> str:
    """Return a clause on the share of a full bf16 decode step that `part`, by default the largest part, takes."""
    parts = base.engine.parts(base.batch, plan.work.prompt + plan.work.age)
    part = part or max(parts, key=lambda name: parts[name])
    share = f"{parts[part] / sum(parts.values()):.0%} of a full decode step"
    if part == "keys and values":
        gain = f"{plan.rollout_gain('fp8', 1) or 1:.2f}× {marks(plan)['rollouts']}"
        rest = f"with those in FP8 too rollouts would become {gain}"
        return f"{share} reads keys and values, which stay as they are ({rest})"
    if part == "overhead":
        return f"{share} is launches, sampling and all-reduces, which no format shortens"
    return f"{share} reads and multiplies weights, more of it as the batch drains"


def recommended(plan: Plan) -> list[str]:
    """Return the chosen layout as `key=value` settings of a run; none if the plan does not judge."""
    estimate = plan.best[plan.chosen]
    if estimate is None or not plan.resolved:
        return []
    layout, work, asked = estimate.layout, estimate.work, plan.work
    if plan.chosen == "bf16":
        precision = ["rollout.quantization=none", "quantization.uaq_scale=1"]
    else:  # in one flow of training and rollouts, a GPU has FP8 in blocks alone
        blocks = plan.chosen == "fp8" and asked.fp8_learner
        precision = [f"rollout.quantization={'fp8_block' if blocks else plan.chosen}"]
    kv_gb = int(estimate.memory.room / layout.tensor_parallel / 2**30)
    zero = ["learner.backend=deepspeed", f"learner.zero_stage={layout.stage}"]
    return [
        f"placement={layout.placement}",
        "rollout.engine=vllm",
        "rollout.device=cuda",
        "learner.device=cuda",
        *precision,
        f"rollout.workers={layout.engines}",
        f"rollout.vllm.tensor_parallel={layout.tensor_parallel}",
        *([f"rollout.vllm.kv_cache_gb={kv_gb}"] if layout.colocated else []),
        f"learner.workers={layout.ranks}",
        *(["learner.backend=fsdp"] if layout.stage == "fsdp" else zero),
        *(
            f"{key}={getattr(work, name)}"
            for name, key in SEARCHED.items()
            if getattr(work, name) != getattr(asked, name)
        ),
        *(["learner.offload_while_waiting=false"] if layout.colocated and layout.stage == 0 else []),
    ]


# --- the page ----------------------------------------------------------------------------------------------------


def show(plan: Plan, console: Console, check: Footprint | None = None) -> None:
    """Print the plan as a table, with verdict and recommended settings, and the memory of a run's own layout."""
    work, shape = plan.work, plan.shape
    size = f"{shape.params / 1e9:.2f} B" if shape.params >= 1e8 else f"{shape.params / 1e6:.1f} M"
    console.print(
        f"[bold]{shape.name}[/] ({size}) on {plan.gpus:,} × {plan.gpu.name}. A step: {work.prompts:,} × {work.samples} "
        f"answers of up to {work.response:,} tokens (mean {work.answer:,.0f}), prompts of {work.prompt:,}; "
        f"{work.updates} updates",
        highlight=False,
    )
    columns = {name: _values(plan, name, plan.best[name]) for name in plan.best}
    table = Table(show_edge=False)
    table.add_column("")
    for name in plan.best:
        table.add_column(name + (" ◀" if plan.resolved and name == plan.chosen else ""), justify="right")
    sources = marks(plan)
    for label, text in _ROWS.items():
        table.add_row(label.format_map(sources), *("–" if v is None else text(v) for v in columns.values()))
    console.print(table)
    console.print(f"\n{verdict(plan)}", highlight=False)
    if settings := recommended(plan):
        console.print(f"Recommended: {' '.join(settings)}", highlight=False)
    if check:
        state = f"cannot start: {'; '.join(check.problems)}" if check.problems else "can start"
        gpu = ", ".join(f"{turn} {size / 1e9:,.0f}" for turn, size in check.gpu.items())
        console.print(
            f"The run's own layout {state}. GB of a GPU{MARK} of {plan.gpu.memory / 1e9:,.0f}: {gpu}; of a host{MARK} "
            f"{check.host / 1e9:,.0f}; KV slots of an engine{MARK} {check.slots:,}.",
            highlight=False,
        )
    console.print(_legend(plan), highlight=False, markup=False)


def figure(value: float, digits: int = 1) -> str:
    """Return a number with `digits` decimals; below 1 with two significant digits, down to a thousandth."""
    if value >= 1:
        return f"{value:,.{digits}f}"
    return f"{value:.2g}" if value >= 0.001 or value == 0 else "<0.001"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _gigabytes(*sizes: float, digits: int = 0) -> str:
    return " / ".join(figure(size / 1e9, digits) for size in sizes)


_ROWS = {  # names in braces are those of marks()
    "placement": lambda v: v["placement"],
    "engines": lambda v: f"{v['engines']:,} × {v['tensor_parallel']} GPU",
    "learner": lambda v: f"{v['learner_gpus']:,} GPU, {sharding(v['stage'])}",
    "ranks a sequence, tokens a pass": lambda v: f"{v['sequence_parallel']}, {v['micro_tokens']:,}",
    f"GB/GPU, weights / KV{MARK}": lambda v: _gigabytes(v["weights_bytes_per_gpu"], v["kv_bytes_per_gpu"]),
    f"start / learn / sync / rollout{MARK}": lambda v: _gigabytes(*v["bytes_per_gpu"].values()),
    f"GB/host{MARK}": lambda v: _gigabytes(v["host_bytes"]),
    f"KV slots of an engine [S]{MARK}": lambda v: f"{v['kv_slots']:,}",
    "tokens/s drawn {rollouts}": lambda v: f"{v['tokens_per_s']:,.0f}",
    "rollouts, s {rollouts}": lambda v: f"{figure(v['rollout_s'])} ({v['rollout_share']:.0%})",
    "learner, s {learner}": lambda v: figure(v["learn_s"]),
    f"sync, s: object store [C]{MARK}": lambda v: figure(v["sync"]["seconds"]["full"]),
    f"  as a delta [C]{MARK}": lambda v: figure(v["sync"]["seconds"]["delta"]),
    f"  ipc or nccl [C]{MARK}": lambda v: f"{(d := v['sync']['direct'])} {figure(v['sync']['seconds'][d])}",
    "sync full / delta, GB": lambda v: _gigabytes(v["sync"]["full_bytes"], v["sync"]["delta_bytes"], digits=2),
    f"turns, s{MARK}": lambda v: figure(v["turns_s"]),
    "step, s {step}": lambda v: figure(v["step_s"]),
    "gain of rollouts {rollouts}": lambda v: _times(v["rollout_gain"]),
    "gain of the step {step}": lambda v: _times(v["step_gain"]),
}


def _legend(plan: Plan) -> str:
    """Return what the marks mean, and what was measured with this model on this GPU."""
    measured = "Nothing was measured with this model on this GPU. "
    if card := measured_card(plan.shape, plan.gpu):
        name = card.name.upper()
        steps = "; ".join(
            f"{precision} {', '.join(f'{ms:.2f}' for ms in row)}" for precision, row in card.decode_ms.items()
        )
        learns = ", ".join(f"{precision} {seconds:.2f}" for precision, seconds in card.learn_s.items())
        measured = (
            f"[{name}] is computed from what one NVIDIA {name} measured with this package on {card.date} "
            f"(docs/gpu.md). Measured ms of a decode step of {', '.join(map(str, card.batches))} sequences of "
            f"{card.context} tokens: {steps}; more and longer sequences and engines of several GPUs are extrapolated. "
            f"Seconds of the learner's step of {card.learn_tokens:,} tokens, extrapolated from 3 layers: {learns} (in "
            "blocks). "
        )
    if others := [name for name in plan.best if name not in PRECISIONS]:
        measured += f"{', '.join(others)}: with a kernel, which this package does not have; it emulates them, slowly. "
    return (
        f"{MARK} Computed, not timed as a whole. {measured}[S] and [T] are fitted to measurements of other software, "
        "[C] to those of a CPU; without a letter: data sheets, sizes, and what docs/results.md lists as assumed. "
        f"S: {SOURCES['S']}. T: {SOURCES['T']}."
    )
