"""qurl doctor: software and hardware of this machine, and the settings that a run would refuse or emulate here."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement

from qurl_ray import __version__
from qurl_ray.cache import cache_root
from qurl_ray.cli.finding import Finding
from qurl_ray.config.load import runs_folder
from qurl_ray.config.shown import shown_address
from qurl_ray.config.tracking import mlflow_address
from qurl_ray.errors import QurlError
from qurl_ray.files import why_unwritable

_LEAST_SHM, _LEAST_DISK = 2 << 30, 5 << 30
"""Bytes: Ray's object store lies in /dev/shm; a run of a 135M policy keeps two checkpoints of 1.6 GB."""
_PORTS = {8265: "Ray's dashboard", 8000: "qurl serve", 5000: "mlflow server"}


def main(
    gpu: Annotated[bool, typer.Option("--gpu", help="Try what a run on GPUs needs, too. Takes a minute.")] = False,
) -> None:
    """Print versions, devices, kernels, and what would be refused here. The exit status is 1 if no run could start."""
    fatal = 0
    for title, part in parts(gpu):
        typer.echo(title)
        for finding in part():
            fatal += finding.fatal
            typer.echo(f"  {finding.what:22}{finding.found}")
            if finding.problem:
                typer.echo(f"  {'':22}{'!!' if finding.fatal else '!'} {finding.problem}")
    typer.echo(f"{fatal} problem{'s' * (fatal != 1)} that would stop any run")
    raise typer.Exit(1 if fatal else 0)


def parts(gpu: bool) -> Iterator[tuple[str, Callable[[], Iterator[Finding]]]]:
    """Yield titles and the parts of the page."""
    yield "Software", software
    yield "Machine", machine
    yield "Computing", computing
    yield "Places", places
    if gpu:
        import torch

        if torch.cuda.is_available():
            from qurl_ray.cli.doctor_gpu import trials

            yield from trials(torch.device("cuda"))
        else:
            yield "GPUs", lambda: iter([Finding("GPUs", "none", "nothing of them was tried", fatal=True)])


def software() -> Iterator[Finding]:
    """Yield the versions of this package and of its requirements; optional requirements only where installed."""
    yield Finding("qurl-ray", f"{__version__}, {Path(__file__).parents[1]}")
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}")
    for line in metadata.requires("qurl-ray") or ():
        wanted = Requirement(line)
        extra = wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            if not extra:
                yield Finding(wanted.name, "missing", f"install {wanted}", fatal=True)
            continue
        fits = wanted.specifier.contains(version.partition("+")[0], prereleases=True)
        problem = "" if fits else f"this version of qurl-ray is made for {wanted.name}{wanted.specifier}"
        if not extra or wanted.name.startswith("vllm"):
            yield Finding(wanted.name, version, problem, fatal=bool(problem) and not extra)


def machine() -> Iterator[Finding]:
    """Yield processor, memory and GPUs."""
    import torch

    from qurl_ray.numerics.processor import processor_name

    yield Finding("processor", f"{processor_name()}, {os.cpu_count()} cores")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("memory", _gb(total))
    with suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
        little = "little for Ray's object store: containers need --shm-size" if free < _LEAST_SHM else ""
        yield Finding("shared memory", f"{_gb(free)} free", little)
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built for CPUs"
        yield Finding("GPUs", f"none ({built})", "rollout.device=cuda and learner.device=cuda would be refused")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield Finding(
            f"GPU {index}", f"{gpu.name}, {_gb(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
        )


def computing() -> Iterator[Finding]:
    """Yield the kernels of each format, engines, and whether bits are equal."""
    import torch

    from qurl_ray.config.model import TinyModel
    from qurl_ray.engines.vllm.check import check
    from qurl_ray.numerics.invariance import invariance_for
    from qurl_ray.policy.settings import head_dim
    from qurl_ray.policy.tiny import tiny_outline
    from qurl_ray.quant.formats import FORMATS
    from qurl_ray.quant.kernels import kernel_for, why_emulated
    from qurl_ray.quant.training import announced

    devices = [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()
    for device in devices:
        for name, fmt in FORMATS.items():
            if kernel := kernel_for(fmt, device):
                yield Finding(f"{name} on {device.type}", f"kernel {kernel.name}")
            else:
                why = why_emulated(fmt, device)
                yield Finding(f"{name} on {device.type}", f"emulated: {why}", "right numbers, and no speed")
        if device.type == "cuda":
            yield Finding("gradients in fp8_block", announced(FORMATS["fp8_block"], device))
    try:
        check()
        yield Finding("rollout.engine=vllm", "can be used")
    except QurlError as error:
        yield Finding("rollout.engine=vllm", "would be refused", str(error))
    model = tiny_outline(TinyModel()).model
    invariance = invariance_for(model, head_dim=head_dim(model.config))
    yield Finding("quickstart's policy", invariance.sentence())


def places() -> Iterator[Finding]:
    """Yield the folders that runs write to, addresses that the environment names, and ports."""
    try:
        runs = runs_folder(None)
        for name, folder in (("runs", runs), ("cache", cache_root())):
            if reason := why_unwritable(folder):
                problem = f"it cannot be written: {reason}; set $QURL_{name.upper()}"
                yield Finding(name, str(folder), problem, fatal=True)
                continue
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            room = shutil.disk_usage(existing).free
            problem = "little room for checkpoints" if room < _LEAST_DISK else ""
            yield Finding(name, f"{folder}, {_gb(room)} free", problem)
        yield Finding("MLflow", shown_address(mlflow_address(None, runs)))
    except QurlError as error:
        yield Finding("settings", "of the environment", str(error), fatal=True)
    if address := os.environ.get("RAY_ADDRESS"):
        yield Finding("Ray", f"RAY_ADDRESS={address}")
    else:
        from qurl_ray.actors.cluster import check_folder  # which imports Ray

        start = "is started here for each run (RAY_ADDRESS is unset)"
        try:
            check_folder()
            yield Finding("Ray", start)
        except QurlError as error:
            yield Finding("Ray", start, str(error), fatal=True)
    for port, user in _PORTS.items():
        with socket.socket() as probe:
            free = probe.connect_ex(("127.0.0.1", port)) != 0
        yield Finding(f"port {port}", f"{'free' if free else 'in use'} ({user})")


def _gb(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
