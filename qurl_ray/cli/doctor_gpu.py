"""qurl doctor --gpu: tries, in about a minute, the parts that a run on this machine's GPUs needs."""

import importlib.util
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from qurl_ray.cli.finding import Finding
from qurl_ray.config.model import TinyModel
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.engines.make import make_engine
from qurl_ray.engines.protocol import EngineOptions
from qurl_ray.policy.load import load_model
from qurl_ray.policy.tiny import cached_tiny_policy
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.kernels import why_emulated
from qurl_ray.quant.linear import QuantizedLinear, reference_linear
from qurl_ray.quant.quantize import quantize
from qurl_ray.types import PolicySpec, Request, SamplingParams
from qurl_ray.weights.local import quantize_into
from qurl_ray.weights.stream import Unquantized

_ROWS, _N, _K = 48, 512, 1024
_LIMIT = 2e-2
"""Largest relative error of a product in bfloat16, whose result has 8 bits."""
_PEER_S = 60.0
_DRIVER = Path("/proc/driver/nvidia/version")
_OPTIONAL = {
    "flashinfer": "vLLM then samples and attends with slower kernels: pip install flashinfer-python",
    "deep_gemm": "fp8_block then runs on Triton's or CUTLASS's kernels in vLLM, which are slower than bfloat16 for "
    "small batches",
}


def trials(device: torch.device) -> Iterator[tuple[str, Callable[[], Iterator[Finding]]]]:
    """Yield titles and the parts of the page."""
    yield "Versions", versions
    yield "Kernels, against the definition in float32", lambda: products(device)
    yield "Processes", lambda: processes(device)
    yield "vLLM", lambda: engine(device)


def versions() -> Iterator[Finding]:
    """Yield versions that must fit each other, and libraries that make a GPU faster."""
    if torch.cuda.is_available():
        told = _DRIVER.read_text().splitlines()[0] if _DRIVER.is_file() else "driver of unknown version"
        yield Finding("CUDA", f"torch {torch.version.cuda}; {told}")
        built = torch.cuda.get_arch_list()
        if not runs_on(built, torch.cuda.get_device_capability()):
            yield Finding("architecture", f"torch is built for {built}", "none runs on this GPU", fatal=True)
    for package, of in (("torch", "vllm"), ("triton", "torch")):
        yield from wanted_version(package, of)
    for module, cost in _OPTIONAL.items():
        there = importlib.util.find_spec(module) is not None
        yield Finding(module, "installed" if there else "missing", "" if there else cost)


def runs_on(built: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return True if code for one of these architectures runs on a GPU: the same major version, no later minor one."""
    targets = [divmod(int(match[1]), 10) for name in built if (match := re.fullmatch(r"sm_(\d+)[a-z]?", name))]
    return any(major == capability[0] and minor <= capability[1] for major, minor in targets)


def wanted_version(package: str, of: str) -> Iterator[Finding]:
    """Yield whether a package has the version that another one asks for; nothing where one of them is missing."""
    try:
        version, wanted = metadata.version(package), metadata.requires(of) or []
    except metadata.PackageNotFoundError:
        return
    for line in wanted:
        requirement = Requirement(line)
        if requirement.name == package and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
            fits = requirement.specifier.contains(version.partition("+")[0], prereleases=True)
            problem = "" if fits else f"{of} {metadata.version(of)} asks for {requirement}: install that"
            yield Finding(package, f"{version}, for {of} {metadata.version(of)}", problem, fatal=not fits)


def products(device: torch.device) -> Iterator[Finding]:
    """Yield the error of each format's product against its definition, with activations in bfloat16."""
    random = torch.Generator().manual_seed(0)
    w_NK = (0.05 * torch.randn(_N, _K, generator=random)).to(device)
    x_MK = (3 * torch.randn(_ROWS, _K, generator=random)).to(device, torch.bfloat16)
    for name, fmt in FORMATS.items():
        why = why_emulated(fmt, w_NK.device, tuple(w_NK.shape))
        linear = QuantizedLinear(quantize(w_NK, fmt), None)
        expected_MN = reference_linear(x_MK.float(), linear.resident(), None).double()
        error = float((linear(x_MK).double() - expected_MN).norm() / expected_MN.norm())
        result = f"error {error:.1e}, {linear.kernel or f'emulated: {why}'}"
        wrong = f"the kernel is WRONG here: quantization.kernel=emulation computes {name} right, and slowly"
        yield Finding(name, result, "" if error < _LIMIT else wrong, fatal=not error < _LIMIT)


def processes(device: torch.device) -> Iterator[Finding]:
    """Yield whether two processes can share memory of a GPU, and whether several GPUs reach each other."""
    began = time.monotonic()
    value = torch.zeros(1 << 20, device=device)
    context = torch.multiprocessing.get_context("spawn")
    child = context.Process(target=_add_one, args=(value,))
    child.start()
    child.join(_PEER_S)
    child.kill()
    shared = bool((value == 1).all())
    problem = "" if shared else "sync.transport=ipc would fail: containers need --ipc=host, and no PID namespaces"
    yield Finding("shared memory of a GPU", f"{'works' if shared else 'fails'}, {_since(began)}", problem)
    count = torch.cuda.device_count()
    if count < 2:
        return
    blind = [
        (a, b) for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    slow = f"GPUs {blind[0]} of {len(blind)} pairs do not reach each other: NCCL goes through the host" if blind else ""
    yield Finding("peer access", "no" if blind else f"among all {count} GPUs", slow)
    began = time.monotonic()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            free_port = server.getsockname()[1]
        torch.multiprocessing.spawn(_reduce, (count, free_port), nprocs=count)
        yield Finding("NCCL", f"{count} GPUs, {_since(began)}")
    except Exception as error:  # of a process, whatever it was
        yield Finding(
            "NCCL", "fails", f"learners of several GPUs would: {str(error).strip().splitlines()[-1]}", fatal=True
        )


def engine(device: torch.device) -> Iterator[Finding]:
    """Yield whether vLLM starts, takes weights in INT8 and FP8, and generates; on a GPU under CUDA graphs."""
    if importlib.util.find_spec("vllm") is None:
        yield Finding("vllm", "missing", "rollout.engine=vllm would be refused: pip install 'qurl-ray[gpu]'")
        return
    config = TinyModel(cold_start=False, layers=2, hidden_size=256, heads=4, kv_heads=4, intermediate_size=512)
    spec = PolicySpec(source=str(cached_tiny_policy(config, (), lambda *_: None)))
    on_gpu = device.type == "cuda"
    dtype: Unquantized = "bfloat16" if on_gpu else "float32"
    for name in ("int8", "fp8"):
        began = time.monotonic()
        keep = QuantizationConfig().keep
        options = EngineOptions(
            slots=8,
            format_name=name,
            keep=keep,
            threads=max(1, (os.cpu_count() or 1) // 2),
            device=device.type,
            dtype=dtype,
            cuda_graphs=on_gpu,
            kv_cache_bytes=1 << 28,
        )
        try:
            made = make_engine(spec, "vllm", options)
            try:
                started = time.monotonic()
                quantize_into(made, load_model(spec), name, QuantizationConfig(), unquantized=dtype)
                synced = time.monotonic()
                request = Request(
                    uid="0", prompt_ids=torch.arange(5, dtype=torch.int32).numpy(), seed=0,
                    sampling=SamplingParams(max_new_tokens=32, ignore_eos=True),
                )  # fmt: skip
                (answer,) = made.generate([request], version=1)
                seconds = f"start {started - began:.0f} s, sync {synced - started:.1f} s, {_since(synced)} to generate"
                yield Finding(name, f"{len(answer.token_ids)} tokens, {', '.join(made.kernels())}; {seconds}")
            finally:
                made.close()
        except Exception as error:  # of vLLM, CUDA, a compiler: the page goes on
            yield Finding(name, "fails", f"rollout.engine=vllm would fail: {type(error).__name__}: {error}", fatal=True)


def _add_one(value: torch.Tensor) -> None:
    value += 1
    if value.is_cuda:
        torch.cuda.synchronize()


def _reduce(rank: int, count: int, port: int) -> None:
    from torch import distributed

    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    value = torch.ones(1 << 20, device="cuda")
    distributed.all_reduce(value)
    assert bool((value == count).all()), "a wrong sum"
    distributed.destroy_process_group()


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.1f} s"
