"""Cost of the coordinator per trajectory: python benchmarks/coordinator.py (about 2 minutes).

Coordinator, fleet, collector and guard are the real ones, in their actor, with the real tokenizer. Engines and verifier
are modelled inside that process. They answer at once, so that all time is the coordinator's. This script plays a
learner rank: it syncs a version and asks for its shares of steps, as in training.
"""

import asyncio
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import ray
import typer
from shared import RESULTS, machine

from qurl_ray.actors.cluster import own_assignment
from qurl_ray.actors.health import Heartbeat
from qurl_ray.actors.verifier import VerifierPool
from qurl_ray.config import load_config
from qurl_ray.policy.load import load_tokenizer, stop_ids
from qurl_ray.training.coordinator.coordinator import Coordinator, packed_handles
from qurl_ray.training.driver.early import check_early
from qurl_ray.training.driver.prepare import check_run, prepare
from qurl_ray.training.messages import TaskInputs
from qurl_ray.types import Completion, TensorRecord, Verdict
from qurl_ray.weights.messages import Commit, Header, LoadReport, Scored

TOKENS = 32


class Modelled:
    """Stand-in for an actor handle whose calls are answered at once, in the caller's process."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return SimpleNamespace(remote=partial(self._call, name), options=lambda **_: getattr(self, name))

    def _call(self, name: str, *args: Any) -> asyncio.Future:
        future = asyncio.get_running_loop().create_future()
        future.set_result(getattr(self, f"_{name}")(*args))
        return future


class Engine(Modelled):
    """Modelled engine: draws random tokens, as many as a request allows."""

    def __init__(self, index: int) -> None:
        self._index, self._version = index, None

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(boot=str(self._index), pid=self._index, node="", version=self._version, log="")

    def _commit(self, manifest: Any, *_: Any) -> LoadReport:
        self._version = manifest.version
        return LoadReport(kernels=["modelled"], hardware="modelled", probe=[])

    def _weight_max_code(self, _: str) -> int:
        return 127

    def _lengths(self, rng: np.random.Generator, requests: list) -> np.ndarray:
        return np.full(len(requests), requests[0].sampling.max_new_tokens)

    def _generate(self, requests: list, version: int, _: float) -> list[Completion]:
        rng = np.random.default_rng(requests[0].seed)
        lengths = self._lengths(rng, requests)
        tokens = rng.integers(4, 14, (len(requests), lengths.max()), dtype=np.int32)
        logprobs = np.full(lengths.max(), -1.0, np.float32)
        versions = np.full(lengths.max(), version, np.int32)
        return [
            Completion(uid=r.uid, token_ids=t[:n], logprobs=logprobs[:n], versions=versions[:n], finish="length")
            for r, t, n in zip(requests, tokens, lengths, strict=True)
        ]


class Judge(Modelled):
    """Modelled verifier: gives a reward of 1 to every second answer, and 0 to the others."""

    def _judge_many(self, items: list) -> list[Verdict]:
        return [Verdict(reward=float(index % 2)) for index in range(len(items))]


def measure(engines: int, prompts: int, steps: int) -> dict[str, float]:
    """Measure the median seconds of a step and its trajectories; the first step is left out."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            None,
            [
                "model.cold_start=false",
                f"output_dir={folder}",
                f"rollout.workers={engines}",
                f"rollout.prompts_per_step={prompts}",
                f"rollout.max_new_tokens={TOKENS}",
                "algorithm.updates_per_rollout=4",
                "sync.probe_tokens=0",
                "tracking.samples_per_step=0",
            ],
        )
        prepared = prepare(config, check_run(check_early(config)), lambda *_: None)
        tokenizer = load_tokenizer(prepared.spec)
        stops = stop_ids(prepared.spec, tokenizer)
        inputs = ray.put(TaskInputs(task=prepared.task, tokenizer=tokenizer, stop_ids=stops, context=512))
        workers = [Engine(index) for index in range(engines)]
        actor = ray.remote(num_cpus=0)(Coordinator).options(max_concurrency=100)
        pool = VerifierPool(verifiers=(Judge(),))
        coordinator = actor.remote(config, packed_handles(workers, pool), Path(folder), None)
        ray.get(coordinator.begin.remote(0, "group", (inputs,), own_assignment()))
        ray.get(coordinator.weight_max_code.remote("int8"))
        record = TensorRecord(name="a.weight", shape=(1, 1), format="none", fingerprint=0, bytes=4)
        header = Header(version=1, attempt=0, rank=0, format="none", weight_max_code=None)
        ray.get(coordinator.weights.remote(Commit(header=header, records=(record,), tickets=[])))
        assert not ray.get(coordinator.weights.remote(Scored(header=header, gaps=())))
        seconds = []
        for step in range(1, steps + 2):
            started = time.perf_counter()
            share = ray.get(coordinator.share.remote(step, 0, 0))
            seconds.append(time.perf_counter() - started)
        got = sum(len(batch) for mini_batch in share for batch in mini_batch.micro_batches)
        assert got == prompts * config.rollout.samples_per_prompt, got
        ray.kill(coordinator)
    per_step = statistics.median(seconds[1:])
    return {"engines": engines, "trajectories": got, "step_seconds": per_step, "per_second": got / per_step}


def main(
    engines: Annotated[list[int] | None, typer.Option(help="Engines; 10, 100, 500 and 2000 if absent.")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts of a step, with 8 answers each.")] = 1024,
    steps: Annotated[int, typer.Option(help="Steps of which the median is taken.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = RESULTS
    / "coordinator.json",
) -> None:
    """Measure the trajectories per second through the coordinator alone."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    print(f"{machine()}\n\n| engines | trajectories of a step | s | trajectories/s | µs each |\n|---|---|---|---|---|")
    found = []
    for count in engines or (10, 100, 500, 2000):
        row = measure(count, prompts, steps)
        found.append(row)
        print(
            f"| {count} | {row['trajectories']} | {row['step_seconds']:.2f} | {row['per_second']:,.0f} | "
            f"{1e6 / row['per_second']:.0f} |",
            flush=True,
        )
    if out:
        out.write_text(json.dumps({"machine": machine(), "tokens": TOKENS, "rows": found}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
