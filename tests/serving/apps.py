"""Policies to serve, and an app in a process of its own, as a user starts it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from openai import AsyncOpenAI, OpenAI

from qurl_ray.config.model import TinyModel
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.policy.export import save_quantized
from qurl_ray.policy.load import load_model, load_tokenizer
from qurl_ray.policy.ranges import measured_factors
from qurl_ray.policy.save import save_policy
from qurl_ray.policy.tiny import cached_tiny_policy
from qurl_ray.quant.units import units
from qurl_ray.types import PolicySpec
from tests.conftest import SUMS, taken
from tests.training.runs import ROOT, descendants, kill_all

KEY = "sk-test-0123456789"
START_S = 900
SUM = [{"role": "user", "content": "12+34="}]
"""Messages of a chat."""
BREAKING = ("1/0", "1+none", "10^9", "refused")
"""Contents of messages on which the policies' chat template raises: an error of arithmetic, of types, of the sandbox,
and the one that is meant for this."""
TEMPLATE = """{% for message in messages -%}
{% if message.content == '1/0' %}{{ 1 // 0 }}{% endif -%}
{% if message.content == '1+none' %}{{ 1 + none }}{% endif -%}
{% if message.content == '10^9' %}{{ range(10 ** 9) | length }}{% endif -%}
{% if message.content == 'refused' %}{{ raise_exception('no such\n thing') }}{% endif -%}
{{ message.content }}
{%- endfor %}"""


def save_run(runs: Path, name: str, *, seed: int) -> Path:
    """The folder of a run that has finished: a policy that talks at length, and its INT8 codes."""
    config = TinyModel(
        cold_start=False, layers=2, hidden_size=128, heads=4, kv_heads=2, intermediate_size=256, max_length=1024
    )
    spec = PolicySpec(source=str(cached_tiny_policy(config, SUMS, lambda *_: None)))
    model, tokenizer = load_model(spec), load_tokenizer(spec)
    tokenizer.chat_template = TEMPLATE
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4).add_(0.05 * torch.randn(parameter.shape, generator=generator))
    run = runs / name
    save_policy(model, tokenizer, run / "policy")
    fmt = taken("int8")
    keep = QuantizationConfig().keep
    factors = measured_factors(model, units(model, keep))
    save_quantized(model, tokenizer, run / "policy-int8", fmt, keep, factors)
    (run / "config.yaml").write_text("name: " + name)
    (run / "summary.json").write_text(json.dumps({"name": name, "steps": 1, "interrupted": False}))
    return run


def streamed(chunks) -> str:
    """Text of a stream's chunks, of all choices."""
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@dataclass(kw_only=True)
class Server:
    """An app that runs."""

    process: subprocess.Popen
    port: int
    runs: Path
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options) -> OpenAI:
        return OpenAI(**{"base_url": f"{self.url}/v1", "api_key": KEY, "timeout": 60, "max_retries": 0} | options)

    def async_client(self, **options) -> AsyncOpenAI:
        return AsyncOpenAI(**{"base_url": f"{self.url}/v1", "api_key": KEY, "timeout": 60, "max_retries": 0} | options)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30)

    def replicas(self) -> list[int]:
        """Process ids."""
        return [pid for pid, command in descendants(self.process.pid) if command.startswith("ray::ServeReplica")]

    def logs(self) -> set[Path]:
        """Files that replicas and proxies write to."""
        found = [pid for pid, command in descendants(self.process.pid) if command.startswith("ray::")]
        errors = {Path(f"/proc/{pid}/fd/2").resolve() for pid in found}
        return {path for path in errors if path.suffix == ".err"} | {
            path for error in errors for path in error.parent.glob("serve/*.log")
        }

    def swap(self, policy: object) -> subprocess.CompletedProcess:
        settings = [f"policy={policy}", f"port={self.port}"]
        command = [sys.executable, "jobs/serve.py", "--swap", *settings]
        return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=180)


def environment(**extra: str) -> dict[str, str]:
    """One thread each, metrics every half second, the key as a file holds it, and no cluster of others."""
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    fast = {"OMP_NUM_THREADS": "1", "RAY_metrics_report_interval_ms": "500", "QURL_API_KEY": KEY + "\n"}
    return kept | fast | {"PYTHONPATH": str(ROOT)} | extra


@contextlib.contextmanager
def serving(runs: Path, *settings: str, **extra: str) -> Iterator[Server]:
    """jobs/serve.py with these settings, when it answers."""
    with started(runs, *settings, **extra) as server:
        wait_until_healthy(server.process, server.port, server.log)
        yield server


@contextlib.contextmanager
def started(runs: Path, *settings: str, **extra: str) -> Iterator[Server]:
    """jobs/serve.py with these settings, from its first moment."""
    port, log = free_port(), runs / "serve.log"
    command = [sys.executable, "jobs/serve.py", f"output_dir={runs}", f"port={port}", "threads=1", *settings]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(**extra), stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield Server(process=process, port=port, runs=runs, log=log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            kill_all(process)
            raise


def wait_until_healthy(process: subprocess.Popen, port: int, log: Path) -> None:
    until = time.monotonic() + START_S
    while "Ctrl-C" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.2)
    assert httpx.get(f"http://127.0.0.1:{port}/health").json() == {"status": "ok"}
