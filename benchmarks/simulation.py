"""A cluster of any size around the real coordinator. Its clock skips the time that modelled engines and learners take.

Real, in one process: coordinator, fleet, collector, guard, batching, gate and manifests, with the real tokenizer and
answers of real lengths; and serialization of each rank's share. Modelled: how long engines generate and load, how long
ranks learn (qurl_ray.planning), and the cost for the caller of a call that sends requests and gets answers, which is
measured on this machine. Judging takes no time, and data that ranks send arrives at no cost. The clock is that of the
process plus all time that it would have slept: what the coordinator computes takes its real time.
"""

import asyncio
import selectors
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import ray.cloudpickle
from coordinator import Engine, Judge
from engines import requests

import qurl_ray.actors.fleet
import qurl_ray.spans
import qurl_ray.training.coordinator.collect
from qurl_ray.actors.cluster import own_assignment
from qurl_ray.actors.verifier import VerifierPool
from qurl_ray.config import RunConfig
from qurl_ray.learner.protocol import StepResult
from qurl_ray.planning.machines import CONSTANTS
from qurl_ray.planning.speed import EngineRoofline, learn_s
from qurl_ray.planning.sync import delta_bytes, sent_bytes
from qurl_ray.planning.workload import Workload
from qurl_ray.policy.load import load_tokenizer, stop_ids
from qurl_ray.training.coordinator.coordinator import Coordinator
from qurl_ray.training.driver.prepare import Prepared
from qurl_ray.training.messages import TaskInputs
from qurl_ray.types import Completion, Request, TensorRecord
from qurl_ray.weights.messages import Commit, Header, LoadReport, Scored

_BINS = 64  # intervals of decode steps of a chunk, in which the batch is taken as constant


class Clock:
    """Clock that skips the time that an event loop would sleep."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def now(self) -> float:
        """Time in seconds, including the skipped time."""
        return time.perf_counter() + self.skipped

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop on this clock. From now on the coordinator's modules read the same clock."""
        made = asyncio.SelectorEventLoop(_Skipping(self))
        made.time = self.now
        shim = SimpleNamespace(monotonic=self.now, perf_counter=self.now, time=self.now)
        for module in (qurl_ray.actors.fleet, qurl_ray.spans, qurl_ray.training.coordinator.collect):
            module.time = shim
        return made


class _Skipping(selectors.DefaultSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(timeout if timeout is None else 0)
        if not ready and timeout:
            self._clock.skipped += timeout
        return ready


@dataclass(kw_only=True)
class Cluster:
    """Parameters and counters that the modelled parts share.

    Args:
        call_s: seconds of the caller for a call that sends a chunk of requests to an actor and gets the answers.
        load_s: seconds to load and verify a version in an engine.
        mean: mean length of the answers in tokens; lengths are uniform up to twice it.
    """

    clock: Clock
    roofline: EngineRoofline
    call_s: float
    load_s: float
    mean: int
    busy_s: Counter[int] = field(default_factory=Counter)
    """Seconds that each engine generates in a step, by index of the engine."""
    calls: int = 0

    def chunk_s(self, lengths: np.ndarray, prompt: int) -> float:
        """Seconds to generate a chunk of requests that begin together and end one after the other."""
        seconds = self.roofline.prefill_s(len(lengths), prompt)
        for tokens in np.array_split(np.arange(lengths.max()), min(_BINS, lengths.max())):
            seconds += len(tokens) * self.roofline.decode_s((lengths > tokens[0]).sum(), prompt + tokens.mean())
        return seconds


class ModelledEngine(Engine):
    """One tensor-parallel group. A call costs its caller `call_s`; its answer comes after the modelled time."""

    def __init__(self, index: int, cluster: Cluster) -> None:
        super().__init__(index)
        self._cluster, self._seconds = cluster, 0.0

    def _call(self, name: str, *args: Any) -> asyncio.Future:
        cluster, loop = self._cluster, asyncio.get_running_loop()
        cluster.clock.skipped += cluster.call_s
        cluster.calls += 1
        self._seconds, began = 1e-3, time.perf_counter()
        answer = getattr(self, f"_{name}")(*args)
        cluster.clock.skipped -= time.perf_counter() - began  # spent by the modelled engine, not by the coordinator
        future = loop.create_future()
        loop.call_later(self._seconds, lambda: future.done() or future.set_result(answer))
        return future

    def _commit(self, *args: Any) -> LoadReport:
        self._seconds = self._cluster.load_s
        return super()._commit(*args)

    def _cancel(self, _: list[str]) -> None:
        pass

    def _lengths(self, rng: np.random.Generator, requests: list) -> np.ndarray:
        lengths = rng.integers(1, 2 * self._cluster.mean, len(requests))
        self._seconds = self._cluster.chunk_s(lengths, len(requests[0].prompt_ids))
        self._cluster.busy_s[self._index] += self._seconds
        return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A cluster and its workload."""

    gpus: int
    rollout_share: float
    config: RunConfig
    work: Workload
    roofline: EngineRoofline
    network: float
    """Bandwidth of each node to others, in B/s."""
    delta: bool
    steps: int
    tensors: int = 200

    @property
    def engines(self) -> int:
        return max(1, round(self.gpus * self.rollout_share) // self.roofline.tensor_parallel)

    @property
    def ranks(self) -> int:
        return max(1, self.gpus - self.engines * self.roofline.tensor_parallel)

    @property
    def load_s(self) -> float:
        """Seconds to load a version: once through the network, as a pipeline over nodes, and into the GPUs."""
        shape, precision = self.roofline.shape, self.roofline.precision
        sent = delta_bytes(shape) if self.delta else sent_bytes(shape, precision, Workload())
        nodes = self.gpus > 8
        seconds = (sent / self.network if nodes else 0.0) + sent / self.roofline.gpu.host
        return seconds / CONSTANTS.link

    @property
    def learn_s(self) -> float:
        return learn_s(self.roofline.shape, self.roofline.gpu, self.work, ranks=self.ranks, stage=2)


class Simulation:
    """One simulation. It is an actor, because the coordinator asks which actor it runs in."""

    def run(self, scenario: Scenario, prepared: Prepared, call_s: float) -> dict[str, float]:
        clock = Clock()
        loop = clock.loop()
        asyncio.set_event_loop(loop)
        cluster = Cluster(
            clock=clock,
            roofline=scenario.roofline,
            call_s=call_s,
            load_s=scenario.load_s,
            mean=int(scenario.work.answer),
        )
        return loop.run_until_complete(_run(scenario, prepared, cluster))


async def _run(scenario: Scenario, prepared: Prepared, cluster: Cluster) -> dict[str, float]:
    workers = [ModelledEngine(index, cluster) for index in range(scenario.engines)]
    pool = VerifierPool(verifiers=(Judge(),))
    coordinator = Coordinator(scenario.config, (workers, pool, ()), Path(scenario.config.output_dir), None)
    tokenizer = load_tokenizer(prepared.spec)
    inputs = asyncio.get_running_loop().create_future()
    stops = stop_ids(prepared.spec, tokenizer)
    inputs.set_result(TaskInputs(task=prepared.task, tokenizer=tokenizer, stop_ids=stops, context=512))
    ranks, assignment = range(scenario.ranks), own_assignment()
    await asyncio.gather(*(coordinator.begin(rank, "group", (inputs,), assignment) for rank in ranks))
    await coordinator.weight_max_code("int8")
    await _sync(scenario, coordinator, 1)
    step_s, share_s, sync_s, busy_s, slowest_s, clock = [], [], [], [], [], cluster.clock
    for step in range(1, scenario.steps + 1):
        began = clock.now()
        for share in await asyncio.gather(*(coordinator.share(step, rank, 0) for rank in ranks)):
            ray.cloudpickle.dumps(share, protocol=5)
        share_s.append(clock.now() - began)
        await asyncio.sleep(scenario.learn_s)
        result = StepResult(
            sums={}, seconds={"logprob": 0.0, "update": scenario.learn_s}, grad_norm=1.0, lr=0.0, skipped_updates=0,
            proximal={},
        )  # fmt: skip
        await asyncio.gather(*(coordinator.report(step, rank, result) for rank in ranks))
        synced = clock.now()
        await _sync(scenario, coordinator, step + 1)
        sync_s.append(clock.now() - synced)
        seconds = {"wait": share_s[-1], "sync": sync_s[-1], "step": clock.now() - began}
        await asyncio.gather(*(coordinator.close(step, rank, seconds, []) for rank in ranks))
        step_s.append(clock.now() - began)
        await coordinator.drain()
        busy_s.append(cluster.busy_s.total() / scenario.engines)
        slowest_s.append(max(cluster.busy_s.values()))
        cluster.busy_s.clear()
        if step == 1:  # the first step is a warm-up
            cluster.calls = 0
    step = statistics.median(step_s[1:])
    return {
        "gpus": scenario.gpus,
        "engines": scenario.engines,
        "ranks": scenario.ranks,
        "trajectories": scenario.work.sequences,
        "step_s": step,
        "wait_s": statistics.median(share_s[1:]),
        "slowest_engine_s": statistics.median(slowest_s[1:]),
        "learn_s": scenario.learn_s,
        "sync_s": statistics.median(sync_s[1:]),
        "load_s": scenario.load_s,
        "engines_idle": 1 - statistics.median(busy_s[1:]) / step,
        "calls": cluster.calls / (scenario.steps - 1),
    }


async def _sync(scenario: Scenario, coordinator: Coordinator, version: int) -> None:
    """Let all ranks commit their tensors and score the probes. The model has `scenario.tensors` tensors."""
    owned = [list(range(rank, scenario.tensors, scenario.ranks)) for rank in range(scenario.ranks)]

    async def one(rank: int) -> None:
        records = tuple(
            TensorRecord(name=f"layers.{index}.weight", shape=(1, 1), format="none", fingerprint=0, bytes=4)
            for index in owned[rank]
        )
        header = Header(version=version, attempt=0, rank=rank, format="none", weight_max_code=None)
        await coordinator.weights(Commit(header=header, records=records, tickets=[]))
        await coordinator.weights(Scored(header=header, gaps=()))

    await asyncio.gather(*(one(rank) for rank in range(scenario.ranks)))


@ray.remote(num_cpus=0)
class _Answers:
    def generate(self, requests: list[Request]) -> list[Completion]:
        return Engine(0)._generate(requests, 1, 0.0)


def call_cost(answers: int, prompt: int, tokens: int, count: int = 1000) -> float:
    """Measure the processor seconds of the caller for a call that sends requests to an actor, and for their answers."""
    chunk = requests(10, [tokens] * answers, prompt)
    actor = _Answers.remote()
    ray.get(actor.generate.remote(chunk))
    began = time.process_time()
    ray.get([actor.generate.remote(chunk) for _ in range(count)])
    return (time.process_time() - began) / count
