"""The planner against published figures and measurements here: python benchmarks/planner.py (about ten minutes).

Writes benchmarks/results/planner.json and planner.md. `--part` makes one of these parts, and keeps the others' results:

- published: figures that others published, and what expert parallelism is planned to save, which takes no time;
- host: what hosts compute in a sync, as rates of this one (seconds);
- memory: bytes of a learner, by its backend and ZeRO stage, as torch's allocator counts them (ten minutes);
- experts: the same of a small mixture of experts.

Nothing else should use the machine during this time.
"""

import gc
import json
import mmap
import os
import statistics
import tempfile
import timeit
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.multiprocessing as mp
import typer
from published import NAMED, Point, fitted_points, points
from random_policy import shape_spec, trajectory
from rich.console import Console
from shared import RESULTS, ROOT, machine
from torch import distributed
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from qurl_ray.config import load_config
from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.batching import plan as share_out
from qurl_ray.learner.learner import make_learner
from qurl_ray.planning.machines import CONSTANTS, find_gpu
from qurl_ray.planning.memory import BUCKET, Stage, learner_bytes, learner_stage
from qurl_ray.planning.shapes import SHAPES, Shape, configured_shape
from qurl_ray.planning.speed import learn_s
from qurl_ray.planning.workload import Workload, configured_workload
from qurl_ray.policy.load import empty_model
from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.linear import weight_max_code
from qurl_ray.quant.quantize import quantize
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.types import PolicySpec
from qurl_ray.weights.delta import encode_delta

# --- the host ----------------------------------------------------------------------------------------------------

_WEIGHT, _TIMES = (8192, 4096), 5  # shape of the weight on which a host is timed, beyond caches, and repetitions
_CHANGED = 0.01  # share of codes that change between two versions that a delta is timed with


def measure_host() -> dict[str, float]:
    """Return the rates of this host that Constants has, in B/s, on a weight that no cache holds."""
    weight = torch.randn(_WEIGHT) * 0.02
    q = quantize(weight, get_format("int8", weight_max_code(get_format("int8"), weight.device)))
    codes = q.codes.view(torch.uint8).numpy()
    others, moved, size = codes.copy(), codes + (np.random.default_rng(0).random(codes.shape) < _CHANGED), weight.nbytes
    delta = encode_delta(codes, moved)
    assert delta, "so few changes are packed"
    rounded, copied, flat = weight.to(torch.bfloat16).float, weight.clone(), weight.numpy().reshape(-1)

    def rate(amount: float, call: Callable[[], object]) -> float:
        call()
        return amount / statistics.median(timeit.repeat(call, gc.enable, number=1, repeat=_TIMES))

    return {
        "fingerprint": rate(size, lambda: fingerprint(weight)),
        "compare": rate(codes.nbytes, lambda: np.count_nonzero(codes != others)),
        "copy": rate(size, lambda: copied.copy_(weight)),
        "put": rate(size, lambda: np.copyto(np.frombuffer(mmap.mmap(-1, size), np.float32), flat)),
        "changes": rate(delta.nbytes, lambda: encode_delta(codes, moved)),
        "convert": rate(size, rounded),
    }


# --- memory ------------------------------------------------------------------------------------------------------

LEARNERS: dict[str, tuple[int, dict[str, Any]]] = {
    "torch": (1, {}),
    "ZeRO 1, 2 ranks": (2, {"backend": "deepspeed", "zero_stage": 1}),
    "ZeRO 2, 2 ranks": (2, {"backend": "deepspeed", "zero_stage": 2}),
    "ZeRO 3": (1, {"backend": "deepspeed", "zero_stage": 3}),
    "ZeRO 3, 2 ranks": (2, {"backend": "deepspeed", "zero_stage": 3}),
    "ZeRO 3, 2 ranks, bfloat16": (2, {"backend": "deepspeed", "zero_stage": 3, "compute": "bfloat16"}),
    "FSDP2": (1, {"backend": "fsdp"}),
    "FSDP2, 2 ranks": (2, {"backend": "fsdp"}),
}
"""Number of ranks and settings of each learner that is measured."""
EXPERT_PARALLEL: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP2, 4 ranks": (4, {"backend": "fsdp"}),
    "FSDP2, experts over 2 ranks": (2, {"backend": "fsdp", "expert_parallel": True}),
    "FSDP2, experts over 4 ranks": (4, {"backend": "fsdp", "expert_parallel": True}),
}
"""Learners that are measured with a mixture of experts, too."""

MIXTURE = Shape(
    name="a mixture of 86 M parameters (8 experts, 2 active)",
    hidden=512,
    layers=8,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=768,
    vocab=8192,
    tied=True,
    experts=8,
    active=2,
)


def compare_memory(shape: Shape, learners: dict[str, tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return predicted and measured bytes of rank 0 of each learner, of this shape, in two steps."""
    rows = []
    for label, (ranks, settings) in learners.items():
        work = Workload(
            prompts=4, samples=1, prompt=32, response=32, mean=32.0, updates=2, micro_tokens=64,
            autocast=settings.get("compute") == "bfloat16", expert_parallel=settings.get("expert_parallel", False),
        )  # fmt: skip
        stage: Stage = "fsdp" if settings.get("backend") == "fsdp" else settings.get("zero_stage", 0)
        predicted = learner_bytes(shape, work, ranks=ranks, stage=stage, overlaps=False)["learn"]
        with tempfile.TemporaryDirectory() as folder:
            spec = shape_spec(shape, work, Path(folder))
            mp.spawn(_learn, (ranks, Path(folder), spec, shape, work, settings), nprocs=ranks)
            measured = int((Path(folder) / "bytes").read_text())
        fixed = 4 * BUCKET if stage in (1, 2, 3) else 0
        rows.append({"learner": label, "predicted": predicted, "measured": measured, "fixed": fixed})
        print(rows[-1], flush=True)
    return {"machine": machine(), "shape": shape.name, "rows": rows}


def _learn(
    rank: int, ranks: int, folder: Path, spec: PolicySpec, shape: Shape, work: Workload, settings: dict[str, Any]
) -> None:
    """Make a learner and two steps as one of the ranks. Rank 0 writes the most bytes that torch had allocated."""
    os.environ |= {"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}  # as Ray Train sets it; DeepSpeed insists
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    config = LearnerConfig(
        gradient_checkpointing=work.checkpointing, tokens_per_micro_batch=work.micro_tokens, workers=ranks, **settings
    )
    groups = [[trajectory(shape, work, index)] for index in range(work.prompts)]
    shares = share_out(groups, updates=work.updates, ranks=ranks, token_budget=work.micro_tokens, seed=0)

    def learn() -> None:
        torch.manual_seed(0)
        objective = ObjectiveSettings(clip_low=0.2, clip_high=0.28)
        learner = make_learner(empty_model(spec), config, objective, temperature=1.0, total_updates=100)
        for _ in range(2):
            learner.learn(shares[rank])

    most = allocated(learn)
    if rank == 0:
        (folder / "bytes").write_text(str(most))
    distributed.barrier()
    os._exit(0)  # gloo's threads may abort a process that shuts down


def allocated(call: Callable[[], None]) -> int:
    """Return the most bytes that torch had allocated on the CPU at once during `call`, used or not, without the copies
    that gloo makes of what it gathers and reduces: a GPU's NCCL makes none."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events, left = [], list(recorded.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left.extend(event.children)
        if event.tag == _EventType.Allocation:
            events.append(event)
    held: dict[int, int] = {}  # bytes by address: gloo's threads free what they were given, and no event tells
    total = most = 0
    for event in sorted(events, key=lambda event: event.start_time_ns):
        size, place = event.extra_fields.alloc_size, event.extra_fields.ptr
        total -= held.pop(place, 0)
        if size > 0 and not _of_gloo(event):
            held[place] = size
            total += size
            most = max(most, total)
    return most


def _of_gloo(event: Any) -> bool:
    """Return True for an allocation that a collective makes by itself."""
    parents = []
    while (event := event.parent) and len(parents) < 3:
        parents.append(event.name)
    return any(name.startswith(("gloo:", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_")) for name in parents)


# --- expert parallelism ------------------------------------------------------------------------------------------


def planned_learner_s() -> dict[str, dict[str, float]]:
    """Return planned seconds of qwen3_30b_a3b's learner in a step, by tokens of a pass, without and with expert
    parallelism."""
    config = load_config(ROOT / "qurl_ray/configs/qwen3_30b_a3b.yaml")
    work, shape, stage = configured_workload(config), configured_shape(config.model), learner_stage(config.learner)

    def seconds(tokens: int, parallel: bool) -> float:
        passes = replace(work, micro_tokens=tokens, expert_parallel=parallel)
        return learn_s(shape, find_gpu("h100"), passes, ranks=config.learner.workers, stage=stage)

    return {
        str(tokens): {"without": seconds(tokens, False), "with": seconds(tokens, True)}
        for tokens in (8192, 16384, 32768)
    }


# --- report ------------------------------------------------------------------------------------------------------


def as_point(point: Point) -> dict[str, Any]:
    """Return the point as plain values."""
    names = ("source", "what", "unit", "low", "high", "fitted")
    return {name: getattr(point, name) for name in names} | {"planner": point.predict(), "error": point.error()}


def figure(point: Point) -> tuple[str, str]:
    """Return the published figure and the planner's prediction, as text with the unit."""

    def number(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"

    unit = point.unit if point.unit == "×" else f" {point.unit}"
    published = number(point.low) + (f"–{number(point.high)}" if point.high > point.low else "")
    return published, number(point.predict()) + unit


def published_table(rows: list[Point]) -> list[str]:
    lines = ["| source | figure | published | planner | error |", "|---|---|---|---|---|"]
    for point in rows:
        name = point.what + (" (fitted)" if point.fitted else "")
        published, planner = figure(point)
        lines.append(f"| {point.source} | {name} | {published} | {planner} | {point.error():+.0%} |")
    fitted = [abs(point.error()) for point in fitted_points()]
    others = [abs(point.error()) for point in rows if not point.fitted]
    return [
        *lines,
        "",
        f"{len(fitted)} decode steps that the constants were fitted to: mean error {statistics.mean(fitted):.1%}, "
        f"largest {max(fitted):.1%}. Of {len(others)} figures not fitted {sum(e <= 0.15 for e in others)} are within "
        "15 %.",
        "",
        *(f"- {name}: {text}" for name, text in NAMED.items()),
    ]


def parallel_table(found: dict[str, dict[str, float]]) -> list[str]:
    return [
        "Planned seconds of the learner in a step of the preset qwen3_30b_a3b, on 16 H100.",
        "",
        "| tokens of a pass | without expert parallelism | with |",
        "|---|---|---|",
        *(f"| {tokens} | {took['without']:.0f} | {took['with']:.0f} |" for tokens, took in found.items()),
    ]


def host_table(found: dict[str, Any]) -> list[str]:
    return [
        f"Rates of a host, GB/s. {found['machine']}.",
        "",
        "| rate | measured | planned with |",
        "|---|---|---|",
        *(f"| {n} | {r / 1e9:.3g} | {getattr(CONSTANTS, n) / 1e9:.3g} |" for n, r in found["rates"].items()),
    ]


def memory_table(found: dict[str, Any]) -> list[str]:
    return [
        f"Memory of a learner's rank, {found['shape']}, GB that torch has allocated at most; the last column leaves "
        f"out DeepSpeed's bucket of fixed size. {found['machine']}.",
        "",
        "| learner | predicted | measured | error | without bucket |",
        "|---|---|---|---|---|",
        *(
            f"| {row['learner']} | {row['predicted'] / 1e9:.2f} | {row['measured'] / 1e9:.2f} "
            f"| {row['predicted'] / row['measured'] - 1:+.0%} "
            f"| {(row['predicted'] - row['fixed']) / (row['measured'] - row['fixed']) - 1:+.0%} |"
            for row in found["rows"]
        ),
    ]


class Part(StrEnum):
    PUBLISHED = "published"
    HOST = "host"
    MEMORY = "memory"
    EXPERTS = "experts"


def main(
    part: Annotated[list[Part] | None, typer.Option(help="Parts to make; all if absent.")] = None,
    shape: Annotated[str, typer.Option(help="Model whose learners' memory is measured.")] = "SmolLM2-135M",
) -> None:
    """Compare the planner with published figures and with measurements; write benchmarks/results/planner.{json,md}."""
    parts = part or list(Part)
    file = RESULTS / "planner.json"
    values = json.loads(file.read_text()) if file.exists() else {}
    rows = points()
    values |= {"fitted_steps": [as_point(p) for p in fitted_points()], "points": [as_point(p) for p in rows]}
    values["expert_parallel"] = planned_learner_s()
    if Part.HOST in parts:
        values["host"] = {"machine": machine(), "rates": measure_host()}
    if Part.MEMORY in parts:
        values["memory"] = compare_memory(SHAPES[shape], LEARNERS)
    if Part.EXPERTS in parts:
        values["experts"] = compare_memory(MIXTURE, LEARNERS | EXPERT_PARALLEL)
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(values, indent=2) + "\n")
    text = ["# The planner", "", "`python benchmarks/planner.py`, part by part (`--part`).", "", *published_table(rows)]
    tables = {"expert_parallel": parallel_table, "host": host_table, "memory": memory_table, "experts": memory_table}
    for name, table in tables.items():
        text += ["", *table(values[name])] if name in values else []
    (RESULTS / "planner.md").write_text("\n".join(text).rstrip() + "\n")
    Console().print((RESULTS / "planner.md").read_text(), highlight=False)


if __name__ == "__main__":
    typer.run(main)
