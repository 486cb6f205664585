"""Show a plan as a table for people, and as plain values for programs."""

import json
import statistics
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from qurl_ray.planning.advice import MARK, marks, notes, recommended, verdict
from qurl_ray.planning.configured import Check
from qurl_ray.planning.machines import PRECISIONS, Precision
from qurl_ray.planning.measured import Card, measured_card
from qurl_ray.planning.memory import host_bytes
from qurl_ray.planning.plan import PAYS, Plan, StepEstimate, memory_of
from qurl_ray.planning.published import SOURCES, Point, fitted_points, points
from qurl_ray.planning.roofline import BLOCK_BYTES
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.sync import delta_bytes, sent_weights, sync_parts
from qurl_ray.planning.workload import TransportName, Workload

if TYPE_CHECKING:
    from qurl_ray.planning.measure import Machine


def as_values(plan: Plan) -> dict[str, Any]:
    """Return everything that the table shows, and the workload's settings, in seconds, bytes and ratios."""
    work = plan.work
    fields = {name: getattr(work, name) for name in work.__dataclass_fields__}
    return {
        "model": plan.shape.name,
        "parameters": plan.shape.params,
        "gpu": plan.gpu.name,
        "gpus": plan.gpus,
        "work": fields | {"mean": work.answer},
        "formats": {name: _values(plan, name, plan.best[name]) for name in PRECISIONS},
        "fp8_keys_and_values_rollout_gain": plan.rollout_gain("fp8", 1),
        "recommended": plan.chosen,
        "settings": recommended(plan),
        "quantization_pays": plan.chosen != "bf16",
        "amdahl": plan.amdahl,
        "verdict": verdict(plan),
        "notes": notes(plan),
        "measured": asdict(card) if (card := measured_card(plan.shape, plan.gpu)) else None,
        "legend": _legend(plan),
    }


def _values(plan: Plan, precision: Precision, estimate: StepEstimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    layout, shape, work = estimate.layout, plan.shape, estimate.work
    return {
        "placement": layout.placement,
        "engines": layout.engines,
        "tensor_parallel": layout.tensor_parallel,
        "learner_gpus": layout.ranks,
        "stage": layout.stage,
        "sequence_parallel": work.sequence_parallel,
        "micro_tokens": work.micro_tokens,
        "transport": work.transport,
        "kv_slots": estimate.slots,
        "kv_bytes_per_gpu": estimate.room / layout.tensor_parallel,
        "weights_bytes_per_gpu": shape.weight_bytes(BLOCK_BYTES[precision]) / layout.tensor_parallel,
        "bytes_per_gpu": memory_of(estimate),
        "host_bytes": host_bytes(shape, work, ranks=layout.ranks, stage=layout.stage),
        "tokens_per_s": estimate.tokens_per_s,
        "rollout_s": estimate.rollout,
        "learn_s": estimate.learn,
        "sync_s": estimate.sync,
        "turns_s": estimate.turns,
        "step_s": estimate.step,
        "rollout_share": estimate.share,
        "sync": _syncs(plan, precision, estimate),
        "rollout_gain": plan.rollout_gain(precision),
        "step_gain": plan.gain(precision),
    }


def _syncs(plan: Plan, precision: Precision, estimate: StepEstimate) -> dict[str, Any]:
    """Return bytes of a sync, and the seconds of its parts by each transport that the placement allows."""
    layout, shape, gpu = estimate.layout, plan.shape, plan.gpu
    route = layout.route(estimate.work)
    direct: TransportName = "ipc" if layout.placement == "colocated" else "nccl"
    routes = {
        "full": replace(route, transport="object_store", delta=False),
        "delta": replace(route, transport="object_store", delta=True),
        direct: replace(route, transport=direct),
    }
    return {
        "full_bytes": sent_weights(shape, precision).bytes,
        "delta_bytes": delta_bytes(shape),
        "direct": direct,
        "parts": {name: sync_parts(shape, gpu, precision, one) for name, one in routes.items()},
    }


def show(plan: Plan, console: Console, check: Check | None = None) -> None:
    """Print the plan as a table, with verdict, recommended settings and notes, and the check of a run's own layout."""
    work, shape = plan.work, plan.shape
    console.print(
        f"[bold]{shape.name}[/] ({shape.params / 1e9:.2f} B) on {plan.gpus:,} × {plan.gpu.name}. A step: "
        f"{work.prompts:,} × {work.samples} answers of up to {work.response:,} tokens (mean {work.answer:,.0f}), "
        f"prompts of {work.prompt:,}; {work.updates} updates",
        highlight=False,
    )
    columns = {name: _values(plan, name, plan.best[name]) for name in PRECISIONS}
    table = Table(show_edge=False)
    table.add_column("")
    for name in PRECISIONS:
        table.add_column(name + (" ◀" if name == plan.chosen else ""), justify="right")
    of = marks(plan)
    for label, text in _ROWS.items():
        table.add_row(
            label.format_map(asdict(of)), *("–" if values is None else text(values) for values in columns.values())
        )
    console.print(table)
    console.print(f"\n{verdict(plan)}", highlight=False)
    if (gain := plan.amdahl) and (base := plan.best["bf16"]):
        best = max(plan.rollout_gain(name) or 1 for name in ("int8", "fp8"))
        console.print(
            f"By Amdahl: {base.share:.0%} of the step {best:.2f}× {of.rollouts} as fast makes the step {gain:.2f}× "
            f"{of.step}; free rollouts, {1 / (1 - base.share):.2f}× {of.step}.",
            highlight=False,
        )
    console.print(f"Recommended: {' '.join(recommended(plan))}", highlight=False)
    for note in notes(plan):
        console.print(f"Note: {note}.", highlight=False)
    if check:
        console.print(f"The run's own layout {_checked(check, plan)}.", highlight=False)
    console.print(_legend(plan), highlight=False, markup=False)


def _legend(plan: Plan) -> str:
    """Return what the marks mean, and what was measured with this model on this GPU."""
    card = measured_card(plan.shape, plan.gpu)
    return (
        f"{MARK} Computed, not timed as a whole. "
        + (_measured(card) if card else "Nothing was measured with this model on this GPU. ")
        + "[S] and [T] are fitted to measurements of other software, [C] to those of a CPU; without a letter: data "
        f"sheets, sizes, and what docs/results.md lists as assumed. S: {SOURCES['S']}. T: {SOURCES['T']}."
    )


def _measured(card: Card) -> str:
    name = card.name.upper()
    steps = "; ".join(
        f"{precision} {', '.join(f'{ms:.2f}' for ms in row)}" for precision, row in card.decode_ms.items()
    )
    learns = ", ".join(f"{precision} {seconds:.2f}" for precision, seconds in card.learn_s.items())
    return (
        f"[{name}] is computed from what one NVIDIA {name} measured with this package on {card.date} (docs/gpu.md). "
        f"Measured ms of a decode step of {', '.join(map(str, card.batches))} sequences of {card.context} tokens: "
        f"{steps}; more and longer sequences, engines of several GPUs and eager ones are extrapolated. Seconds of the "
        f"learner's step of {card.learn_tokens:,} tokens, extrapolated from 3 layers: {learns} (in blocks). "
    )


def _checked(check: Check, plan: Plan) -> str:
    held = ", ".join(f"{turn} {size / 1e9:,.0f}" for turn, size in check.gpu.items())
    found = "; ".join(check.problems)
    return (
        f"{'cannot start: ' + found if found else 'can start'}. GB of a GPU{MARK} of {plan.gpu.memory / 1e9:,.0f}: "
        f"{held}; of a host{MARK} {check.host / 1e9:,.0f}; KV slots of an engine{MARK} {check.slots:,}"
    )


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _seconds(sync: dict[str, Any], kind: str) -> str:
    return f"{sum(sync['parts'][kind].values()):.1f}"


def _gigabytes(values: dict[str, float]) -> str:
    return " / ".join(f"{size / 1e9:.0f}" for size in values.values())


_ROWS = {  # names in braces are those of Marks
    "placement": lambda v: v["placement"],
    "engines": lambda v: f"{v['engines']:,} × {v['tensor_parallel']} GPU",
    "learner": lambda v: f"{v['learner_gpus']:,} GPU, " + ("FSDP2" if v["stage"] == "fsdp" else f"ZeRO {v['stage']}"),
    "ranks a sequence, tokens a pass": lambda v: f"{v['sequence_parallel']}, {v['micro_tokens']:,}",
    "GB/GPU, weights / KV" + MARK: lambda v: _gigabytes(
        {name: v[f"{name}_bytes_per_gpu"] for name in ("weights", "kv")}
    ),
    "start / learn / sync / rollout" + MARK: lambda v: _gigabytes(v["bytes_per_gpu"]),
    "GB/host" + MARK: lambda v: f"{v['host_bytes'] / 1e9:,.0f}",
    f"KV slots of an engine [S]{MARK}": lambda v: f"{v['kv_slots']:,}",
    "tokens/s drawn {rollouts}": lambda v: f"{v['tokens_per_s']:,.0f}",
    "rollouts, s {rollouts}": lambda v: f"{v['rollout_s']:,.1f} ({v['rollout_share']:.0%})",
    "learner, s {learner}": lambda v: f"{v['learn_s']:,.1f}",
    f"sync, s: object store [C]{MARK}": lambda v: _seconds(v["sync"], "full"),
    f"  as a delta [C]{MARK}": lambda v: _seconds(v["sync"], "delta"),
    f"  ipc or nccl [C]{MARK}": lambda v: f"{v['sync']['direct']} {_seconds(v['sync'], v['sync']['direct'])}",
    "sync full / delta, GB": lambda v: f"{v['sync']['full_bytes'] / 1e9:.2f} / {v['sync']['delta_bytes'] / 1e9:.2f}",
    f"turns, s{MARK}": lambda v: f"{v['turns_s']:.1f}",
    "step, s {step}": lambda v: f"{v['step_s']:,.1f}",
    "gain of rollouts {rollouts}": lambda v: _times(v["rollout_gain"]),
    "gain of the step {step}": lambda v: _times(v["step_gain"]),
}


def show_published(console: Console, *, as_json: bool) -> None:
    """Print published figures beside the planner's predictions."""
    rows, fitted = points(), fitted_points()
    errors = [abs(point.error()) for point in fitted]
    held_out = [abs(point.error()) for point in rows if not point.fitted]
    if as_json:
        console.print_json(
            json.dumps({"fitted_steps": [as_point(p) for p in fitted], "points": [as_point(p) for p in rows]})
        )
        return
    table = Table(show_edge=False)
    for name in ("source", "figure", "published", "planner", "error"):
        table.add_column(name, justify="left" if name in ("source", "figure") else "right")
    for point in rows:
        name = point.what + (" (fitted)" if point.fitted else "")
        table.add_row(point.source, name, *figure(point), f"{point.error():+.0%}")
    console.print(table)
    console.print(
        f"\n{len(fitted)} decode steps that the constants were fitted to: mean error {statistics.mean(errors):.1%}, "
        f"largest {max(errors):.1%}.\nOf {len(held_out)} figures not fitted {sum(e <= 0.15 for e in held_out)} are "
        f"within 15 % of the middle of what was published.",
        highlight=False,
    )


def figure(point: Point) -> tuple[str, str]:
    """Return the published figure and the planner's prediction, as text with the unit."""

    def number(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"

    unit = point.unit if point.unit == "×" else f" {point.unit}"
    published = number(point.low) + (f"–{number(point.high)}" if point.high > point.low else "")
    return published, number(point.predict()) + unit


def as_point(point: Point) -> dict[str, Any]:
    """Return the point as plain values."""
    names = ("source", "what", "unit", "low", "high", "fitted")
    return {name: getattr(point, name) for name in names} | {"planner": point.predict(), "error": point.error()}


def show_machine(shape: Shape, work: Workload, machine: "Machine", console: Console, *, as_json: bool) -> None:
    """Print the phases of a step on the measured machine."""
    phases = {name: machine.phases(work, name) for name in machine.engines}
    steps = {name: sum(seconds.values()) for name, seconds in phases.items()}
    if as_json:
        console.print_json(json.dumps({"model": shape.name, "seconds": phases, "measuring_s": machine.seconds}))
        return
    table = Table(show_edge=False)
    table.add_column(f"{shape.name} on this machine, s of a step")
    for name in phases:
        table.add_column({"none": "float32"}.get(name, name), justify="right")
    for phase in next(iter(phases.values())):
        table.add_row(phase, *(f"{seconds[phase]:.3f}" for seconds in phases.values()))
    table.add_row("step", *(f"{seconds:.3f}" for seconds in steps.values()))
    console.print(table)
    share, faster = phases["none"]["rollout"] / steps["none"], phases["none"]["rollout"] / phases["int8"]["rollout"]
    gain = steps["none"] / steps["int8"]
    pays = "pays" if gain >= PAYS else "does not pay here"
    console.print(
        f"\nQuantization {pays}: {gain:.2f}×. Rollouts, {share:.0%} of a step in float32, become {faster:.2f}× in "
        f"INT8. Measured in {machine.seconds:.0f} s.",
        highlight=False,
    )
