"""Seconds of a weight sync by transport, in runs: from the learner's weights until every engine has verified them.

Each transport is tried where the settings allow it on this machine: `ipc` where engine and learner share a GPU, NCCL's
where they have several. With several GPUs, one has the learner, and each other one an engine.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench, Figures, lacks
from benchmarks.gpu.training import middle, policy_folder, settings, steps_of
from qurl_ray.config.load import load_config
from qurl_ray.errors import ConfigError
from qurl_ray.tables import TRANSPORTS


def run(bench: Bench) -> None:
    if reason := lacks("ray"):
        bench.skip("all of it", reason)
        return
    allowed = {}
    for key, made in runs(bench):
        try:
            load_config(None, [*made, "model.path=to-be-made"])
        except ConfigError as error:
            bench.skip(key, " ".join(str(error).split()))
            continue
        if not bench.has(key):
            allowed[key] = made
    if not allowed:
        return
    with policy_folder(bench) as folder:
        for key, made in allowed.items():
            if figures := bench.attempt(key, partial(measured, bench, folder, made)):
                bench.add(key, figures, summary(figures))


def runs(bench: Bench) -> Iterator[tuple[str, list[str]]]:
    """Yield a name and the settings of each combination of transport and placement."""
    name = "fp8" if "fp8" in bench.scale.formats else "int8"
    engines = torch.cuda.device_count() - 1
    placements = ["colocated"] * bench.cuda + ["disaggregated"] * (engines > 0 or not bench.cuda)
    for placement in placements:
        for transport in TRANSPORTS.entries:
            # Of all else there is little: short answers, and engines that start without capturing anything.
            made = [
                *settings(bench, name, placement),
                "rollout.max_new_tokens=8",
                f"sync.transport={transport}",
            ]
            if bench.cuda:
                made.append("rollout.cuda_graphs=false")
            if bench.cuda and placement == "disaggregated":
                made.append(f"rollout.workers={engines}")
            yield f"{transport}, {placement}", made


def measured(bench: Bench, folder: Path, made: list[str]) -> Figures:
    steps = steps_of(bench, folder, made)[1:]
    return {
        "seconds": middle(steps, "time/sync"),
        "all_seconds": [step["time/sync"] for step in steps],
        "mib": middle(steps, "sync/bytes") / 2**20,
    }


def summary(figures: Figures) -> str:
    return f"{figures['seconds']:.3f} s for {figures['mib']:.0f} MiB"
