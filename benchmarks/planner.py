"""The planner against published figures and measurements here: python benchmarks/planner.py (about 25 minutes).

Writes benchmarks/results/planner.json and planner.md. `--part` makes one of these parts, and keeps the others' results:

- published: figures that others published, which takes no time;
- sync: seconds of a sync through Ray's object store, predicted from the rates of this host (two minutes);
- memory: bytes of a learner, by its backend and ZeRO stage, as torch's allocator counts them (ten minutes);
- runs: `--measure` against runs. The machine is measured before and after each run, and the mean of the two predictions
  is compared with the run's own phase times. Lengths of answers, and the share of groups that dynamic sampling kept,
  are those of the run.

Nothing else should use the machine during this time.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import ray
import torch
import torch.multiprocessing as mp
import typer
from rich.console import Console
from shared import RESULTS, machine
from torch import distributed
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.config.load import load_config
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.learner.batching import plan as share_out
from qurl_ray.learner.learner import make_learner
from qurl_ray.planning.machines import Host
from qurl_ray.planning.measure import Machine, measure, measure_host, shape_spec, trajectory
from qurl_ray.planning.memory import BUCKET, Stage, learner_bytes
from qurl_ray.planning.published import SOURCES, Point, fitted_points, points
from qurl_ray.planning.shapes import SHAPES, Shape, configured_shape
from qurl_ray.planning.show import as_point, figure
from qurl_ray.planning.sync import cpu_sync_parts, sent_weights
from qurl_ray.planning.workload import Workload, configured_workload
from qurl_ray.policy.load import empty_model, tied_head
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.types import PolicySpec
from qurl_ray.weights.local import chosen_codes
from qurl_ray.weights.receiver import decode_buckets
from qurl_ray.weights.stream import Publisher, assemble_manifest

ROOT = Path(__file__).parents[1]
RUNS = {
    "quickstart": {"steps": 24, "prompt": 6, "mean": 3.6, "kept": 0.85},
    "smollm2_135m": {"steps": 5, "prompt": 36, "mean": 13.0, "kept": 0.3},
}
"""Number of steps that are run, and their approximate workload, which the measurement before a run uses."""
PHASES = ("rollout", "logprob", "update", "sync")
_WARM = 1  # warm-up steps, which do not count


def run(preset: str, steps: int, folder: Path) -> list[dict[str, float]]:
    """Run a preset, and return the metrics of each step that counts."""
    command = [
        sys.executable,
        "jobs/qurl_dapo.py",
        "--config",
        f"qurl_ray/configs/{preset}.yaml",
        "--fresh",
        f"steps={steps + _WARM}",
        f"output_dir={folder}",
        "tracking.mlflow=false",
        "tracking.console=plain",
        "evaluation.problems=1",
        "evaluation.every=0",
        "evaluation.target_reward=null",
        "checkpoint.every=0",
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / preset / "metrics.jsonl").read_text().splitlines()
    found = [event["values"] for event in map(json.loads, lines) if event["kind"] == "step"]
    return found[_WARM:]


def compare(preset: str, folder: Path) -> dict[str, Any]:
    """Return predicted and measured seconds of a step's phases, in INT8."""
    config, about = load_config(ROOT / "qurl_ray" / "configs" / f"{preset}.yaml"), RUNS[preset]
    shape = configured_shape(config.model)
    guess = {"prompt": about["prompt"], "mean": about["mean"], "kept": about["kept"]}
    work = replace(configured_workload(config), **guess)
    found = [measure(shape, work)]
    steps = run(preset, about["steps"], folder)
    found.append(measure(shape, work))
    real = as_drawn(work, steps)
    predicted = {name: statistics.mean(one.phases(real, "int8")[name] for one in found) for name in PHASES}
    measured = {name: statistics.median(step[f"time/{name}"] for step in steps) for name in PHASES}
    return {
        "preset": preset,
        "steps": len(steps),
        "lengths": {"prompt": real.prompt, "mean": real.answer, "kept": real.kept},
        "predicted": predicted,
        "measured": measured,
        "error": {name: predicted[name] / measured[name] - 1 for name in PHASES},
        "share": {name: measured[name] / sum(measured.values()) for name in PHASES},
        "before_over_after": drift(found, real),
        "measuring_s": [one.seconds for one in found],
        "predicted_float32": {
            name: statistics.mean(one.phases(real, "none")[name] for one in found) for name in PHASES
        },
    }


def as_drawn(work: Workload, steps: list[dict[str, float]]) -> Workload:
    """Return `work` with the lengths of answers, and the share of samples that was kept, of these steps."""
    samples = statistics.mean(step["rollout/samples"] for step in steps)
    mean = statistics.mean(step["rollout/mean_length"] for step in steps)
    return replace(work, mean=min(float(work.response), mean), kept=min(1.0, work.sequences / samples))


def drift(found: list[Machine], work: Workload) -> float:
    """Ratio of the machine's predicted step time before the run to that after it."""
    before, after = (sum(one.phases(work, "int8").values()) for one in found)
    return before / after


# --- syncs -------------------------------------------------------------------------------------------------------

SYNCED = ("SmolLM2-135M", "Qwen2.5-0.5B")
_SYNCS, _MOVED = 5, 2e-6  # syncs that are timed, and how far each moves the weights


def compare_syncs() -> dict[str, Any]:
    """Return predicted and measured seconds of a sync of each shape and format, with the rates before and after."""
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    before, rows = measure_host(), []
    for name in SYNCED:
        for format_name in ("int8", "none"):
            rows.append({"shape": name, "format": format_name, "measured": sync_seconds(SHAPES[name], format_name)})
    after = measure_host()
    ray.shutdown()
    for row in rows:
        # codes and bfloat16 beside them, or everything in float32
        precision, width = ("int8", 2) if row["format"] == "int8" else ("bf16", 4)
        sent = sent_weights(SHAPES[row["shape"]], precision, width)
        parts = [cpu_sync_parts(sent, host) for host in (before, after)]
        row["parts"] = {part: statistics.mean(one[part] for one in parts) for part in parts[0]}
        row["predicted"] = sum(row["parts"].values())
    return {"machine": machine(), "host": asdict(mean_host(before, after)), "rows": rows}


def mean_host(*hosts: Host) -> Host:
    rates = {name: statistics.mean(getattr(one, name) for one in hosts) for name in Host.__dataclass_fields__}
    return Host(**rates | {"threads": hosts[0].threads})


def sync_seconds(shape: Shape, format_name: str) -> float:
    """Median seconds of a whole sync, without a probe, after each weight has moved."""
    with tempfile.TemporaryDirectory() as folder:
        spec = shape_spec(shape, Workload(), Path(folder))
        model, engine = empty_model(spec), TorchEngine(spec, slots=1)
        fmt, quantized = chosen_codes(engine, model, format_name, QuantizationConfig().keep)
        publisher, seconds = Publisher(quantized, tied=tied_head(model)), []
        for version in range(1, _SYNCS + 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.empty_like(parameter).uniform_(-1, 1), alpha=_MOVED)
            started = time.perf_counter()
            records, refs = [], []
            for bucket in publisher.prepare(
                model.named_parameters(), fmt, version=version, unquantized="bfloat16" if fmt else "float32"
            ):
                refs.append(ray.put(bucket.payloads))
                records.append(bucket.records)
            manifest = assemble_manifest(version, fmt, records)
            engine.load(manifest, decode_buckets(map(ray.get, refs), manifest, engine.resident))
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])  # the first has nothing to compare with


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


def compare_memory(name: str) -> dict[str, Any]:
    """Return predicted and measured bytes of rank 0 of each learner, of this shape, in two steps."""
    shape, rows = SHAPES[name], []
    for label, (ranks, settings) in LEARNERS.items():
        work = Workload(
            prompts=4, samples=1, prompt=32, response=32, mean=32.0, updates=2, micro_tokens=64,
            autocast=settings.get("compute") == "bfloat16",
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
    return {"machine": machine(), "shape": name, "rows": rows}


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
    held, most, copies = 0, 0, set()
    for event in sorted(events, key=lambda event: event.start_time_ns):
        size, place = event.extra_fields.alloc_size, event.extra_fields.ptr
        if size > 0 and _of_gloo(event):
            copies.add(place)
        elif size < 0 and place in copies:
            copies.remove(place)
        else:
            held += size
            most = max(most, held)
    return most


def _of_gloo(event: Any) -> bool:
    """Return True for an allocation that a collective makes by itself."""
    parents = []
    while (event := event.parent) and len(parents) < 3:
        parents.append(event.name)
    return any(name.startswith(("gloo:", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_")) for name in parents)


# --- report ------------------------------------------------------------------------------------------------------


def within(share: float, answers: int) -> list[bool]:
    """Return for each figure that was not fitted whether the prediction is within 15 %.

    Args:
        share: mean length of an answer over its limit.
        answers: answers that an engine draws at a time.
    """
    return [abs(point.error()) <= 0.15 for point in points(share, answers) if not point.fitted]


def sensitivity() -> list[str]:
    """Return a Markdown table of how much the result depends on values that the sources leave out."""
    counts = (64, 128, 256)
    lines = ["| mean, of the limit | " + " | ".join(f"{count} answers an engine" for count in counts) + " |"]
    lines.append("|" + "---|" * (1 + len(counts)))
    for share in (0.15, 0.25, 0.35, 0.5):
        found = [within(share, count) for count in counts]
        lines.append(f"| {share:g} | " + " | ".join(f"{sum(one)} of {len(one)}" for one in found) + " |")
    return lines


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
        "15 %:",
        "",
        *sensitivity(),
        "",
        *(f"- {name}: {text}" for name, text in SOURCES.items()),
    ]


def sync_table(found: dict[str, Any]) -> list[str]:
    host = ", ".join(f"{name} {rate:.2g}" for name, rate in found["host"].items())
    parts = list(found["rows"][0]["parts"])

    def seconds(row: dict[str, Any]) -> str:
        return " | ".join(f"{row['parts'][part]:.2f}" for part in parts)

    return [
        f"A sync through Ray's object store, one rank and one torch engine in one process, s. {found['machine']}. "
        f"Rates of the host, B/s: {host}.",
        "",
        f"| shape | format | {' | '.join(parts)} | predicted | measured | ratio |",
        "|---|---|" + "---|" * (len(parts) + 3),
        *(
            f"| {row['shape']} | {row['format']} | {seconds(row)} "
            f"| {row['predicted']:.2f} | {row['measured']:.2f} | {row['predicted'] / row['measured']:.2f} |"
            for row in found["rows"]
        ),
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


def runs_table(runs: list[dict[str, Any]]) -> list[str]:
    lines = []
    for one in runs:
        lines += [
            f"| {one['preset']}, s of a step | predicted | measured | error | of the step |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {one['predicted'][name]:.3f} | {one['measured'][name]:.3f} | {one['error'][name]:+.0%} "
            f"| {one['share'][name]:.0%} |"
            for name in PHASES
        ]
        lines.append(
            f"\nMedians of {one['steps']} steps. Measuring took {one['measuring_s'][0]:.0f} s before and "
            f"{one['measuring_s'][1]:.0f} s after; before was {one['before_over_after']:.2f} times as slow as after.\n"
        )
    return lines


class Part(StrEnum):
    PUBLISHED = "published"
    SYNC = "sync"
    MEMORY = "memory"
    RUNS = "runs"


def main(
    part: Annotated[list[Part] | None, typer.Option(help="Parts to make; all if absent.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Presets to run; all if absent.")] = None,
    shape: Annotated[str, typer.Option(help="Model whose learners' memory is measured.")] = "SmolLM2-135M",
) -> None:
    """Compare the planner with published figures and with measurements; write benchmarks/results/planner.{json,md}."""
    parts = part or list(Part)
    file = RESULTS / "planner.json"
    values = json.loads(file.read_text()) if file.exists() else {}
    rows = points()
    values |= {"fitted_steps": [as_point(p) for p in fitted_points()], "points": [as_point(p) for p in rows]}
    if Part.SYNC in parts:
        values["sync"] = compare_syncs()
    if Part.MEMORY in parts:
        values["memory"] = compare_memory(shape)
    if Part.RUNS in parts:
        with tempfile.TemporaryDirectory(prefix="planner-") as folder:
            values["runs"] = [compare(preset, Path(folder)) for preset in only or RUNS]
        values["machine"] = machine()
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(values, indent=2) + "\n")
    text = ["# The planner", "", "`python benchmarks/planner.py`, part by part (`--part`).", "", *published_table(rows)]
    for name, table in (("sync", sync_table), ("memory", memory_table)):
        text += ["", *table(values[name])] if name in values else []
    if values.get("runs"):
        text += ["", f"`--measure` against runs. {values['machine']}.", "", *runs_table(values["runs"])]
    (RESULTS / "planner.md").write_text("\n".join(text).rstrip() + "\n")
    Console().print((RESULTS / "planner.md").read_text(), highlight=False)


if __name__ == "__main__":
    typer.run(main)
