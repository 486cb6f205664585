"""Checks of this machine before anything starts: room on the disk, GPUs, cores for processes; the plan of a start."""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from qurl_ray.actors.placement import demand, what_is_missing
from qurl_ray.config import RunConfig
from qurl_ray.errors import ConfigError
from qurl_ray.files import why_unwritable

if TYPE_CHECKING:
    from torch import nn

_NVIDIA_SMI_S = 30.0
_POLICY = 4
"""Bytes of a saved policy per parameter: FP32."""
_CROWD = 8
"""Processes that compute, per core, above which a run is refused: each takes memory, and seconds to start."""
_LARGE = 1e9
"""Bytes of a model's files from which their reading is part of a plan."""
_SAMPLES, _SAMPLE = 16, 4 << 20
"""Parts of a model's files that are read to learn the speed, and bytes of each."""
_MEASURED_START = "four engines of 7B took 118 to 129 s on one H200 with empty caches"
"""Start of vLLM's engines that compile (docs/gpu.md)."""
_STATE = {"adamw": 12, "adamw_8bit": 6, "muon": 8}
"""Bytes of the learner's state per parameter, by optimizer: the parameter in FP32 and its moments. Muon's embeddings
have twice the moments."""


def check_writable(config: RunConfig) -> None:
    """Raise ConfigError unless the folder of runs and that of this run can be written, or made."""
    assert config.output_dir is not None, "resolve() comes first"
    for folder in (config.output_dir, config.output_dir / config.name):
        if error := why_unwritable(folder):
            raise ConfigError(f"cannot write to {folder}: {error}; set output_dir")


def check_disk(config: RunConfig, model: "nn.Module") -> str:
    """Check that the disk holds the checkpoints that are there at a time, and the final policy. Return their size in
    words.

    Args:
        model: policy without weights.

    Raises:
        ConfigError: it does not.
    """
    assert config.output_dir is not None, "resolve() comes first"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    learners = 1 + (getattr(config.algorithm, "critic", None) == "separate")  # which is as large as the policy
    each = parameters * (_POLICY + learners * _STATE[config.learner.optimizer])
    every = config.checkpoint.every
    kept = config.checkpoint.keep + bool(config.evaluation.every)  # the best one, too
    count = min(kept + 1, config.steps // every) if every else 0  # the next one is written beside those kept
    needed = count * each + parameters * _POLICY
    folder = config.output_dir / config.name
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    free += sum(file.stat().st_size for file in folder.glob("checkpoints/**/*") if file.is_file())  # replaced by others
    told = f"checkpoints of {_size(each)}, {count} at a time, and the policy: {_size(needed)} of {_size(free)} free"
    if needed > free:
        raise ConfigError(
            f"the disk of {config.output_dir} is too small: {told}; set output_dir to another disk, or "
            "checkpoint.keep and checkpoint.every"
        )
    return told


def missing_here(config: RunConfig) -> str | None:
    """Return why this machine cannot hold the run; None if it can, or if the run attaches to a cluster."""
    if os.environ.get("RAY_ADDRESS") or ray.is_initialized():
        return None
    cores, processes = os.cpu_count() or 1, config.rollout.workers + config.learner.workers
    if processes > _CROWD * cores:
        return (
            f"this machine cannot hold the run: {config.rollout.workers} rollout workers and {config.learner.workers} "
            f"learner ranks compute on {cores} cores; lower rollout.workers and learner.workers, or set $RAY_ADDRESS "
            "to a cluster"
        )
    asked = demand(config)
    if not asked.total.get("GPU"):
        return None
    import torch  # only where it matters: that takes seconds

    missing = what_is_missing(asked, [asked.total | {"GPU": float(torch.cuda.device_count())}])
    way = "set $RAY_ADDRESS to a cluster, or learner.device=cpu and rollout.device=cpu"
    return f"this machine cannot hold the run: {missing}; {way}" if missing else None


def start_plan(config: RunConfig, folder: Path | None) -> str | None:
    """Return what the start of ranks and engines takes, in words; None if it is a matter of seconds.

    Args:
        folder: the policy's files; None if they are not here.
    """
    files, stages = sorted(folder.glob("*.safetensors")) if folder else [], []
    whole = sum(file.stat().st_size for file in files)
    if whole >= _LARGE:
        speed = read_speed(files)
        stages.append(
            f"the ranks of a node read the model's {_size(whole)} once from the disk and then from memory, here "
            f"{whole / speed:.0f} s at {_size(speed)}/s; engines read no weights, their first come with the first sync"
        )
    if config.rollout.graphs:
        count, start = config.rollout.workers, "one engine starts"
        if count > 1:
            start = f"{count} engines start beside each other"
        if count > 1 and config.rollout.engine == "vllm":
            start += ", and on each node the others wait until the first has compiled"
        measured = f" ({_MEASURED_START})" if config.rollout.engine == "vllm" else ""
        stages.append(f"{start}{measured}, at most {config.rollout.start_limit_s:.0f} s")
    return f"the start, as planned: {'; '.join(stages)}" if stages else None


def read_speed(files: Sequence[Path]) -> float:
    """Return the bytes per second at which these files are read now, from the disk or from memory: of parts of them, at
    equal distances."""
    ends = [0]
    for file in files:
        ends.append(ends[-1] + file.stat().st_size)
    count, started = 0, time.perf_counter()
    for number in range(_SAMPLES):
        at = ends[-1] * number // _SAMPLES
        index = next(i for i in range(len(files)) if at < ends[i + 1])
        with files[index].open("rb", buffering=0) as part:
            part.seek(at - ends[index])
            count += len(part.read(_SAMPLE))
    return count / (time.perf_counter() - started)


def gpu_bytes() -> float | None:
    """Bytes of the smallest GPU of this machine, by nvidia-smi, which puts nothing on a GPU; None without GPUs, or if
    the run attaches to a cluster, whose GPUs may be others."""
    if os.environ.get("RAY_ADDRESS") or ray.is_initialized() or not (program := shutil.which("nvidia-smi")):
        return None
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S)
        return min((float(mib) * 2**20 for mib in done.stdout.split()), default=None)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
