"""A sync through a direct transport from end to end: real senders, learner, fleet and vLLM engines, without Ray. In a
process of its own, as vllm patches torch: `in_a_process`."""

import asyncio
import multiprocessing
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from ray.exceptions import ActorDiedError

from qurl_ray.actors import rollout_worker
from qurl_ray.actors.fleet import Fleet
from qurl_ray.actors.health import Heartbeat
from qurl_ray.actors.local import LocalActor
from qurl_ray.config import load_config
from qurl_ray.learner.learner import make_learner
from qurl_ray.policy.load import load_model, load_tokenizer, tied_head
from qurl_ray.quant.units import units
from qurl_ray.training.rank.objectives import objective_settings
from qurl_ray.weights.floor import ProbeFloor
from qurl_ray.weights.gate import WeightGate
from qurl_ray.weights.messages import Put, WeightMessage
from qurl_ray.weights.sender import Sender
from qurl_ray.weights.stream import Publisher
from qurl_ray.weights.transports import object_store
from qurl_ray.weights.transports.protocol import Link
from tests.conftest import requests_for, taken
from tests.engines.vllm_process import EngineProcess


def in_a_process(scenario: Callable[..., None], *args: object, timeout_s: float = 280) -> None:
    """Run it in a process of its own; its error is the caller's."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, scenario, args))
    process.start()
    try:
        assert pipe.poll(timeout_s), f"no end of {scenario.__name__} in {timeout_s} s"
        error = pipe.recv()
        assert error is None, error
    finally:
        process.join(20)
        process.kill()


def _run(pipe: Any, scenario: Callable[..., None], args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        scenario(*args)
        pipe.send(None)
    except BaseException:
        pipe.send(traceback.format_exc())


class RemoteEngine:
    """An engine of another process, as a rollout worker sees its own."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process

    @property
    def version(self) -> int | None:
        return self._process.call("version")

    def __getattr__(self, method: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return self._process.call(method, *args, **kwargs)
            except TimeoutError:  # an OSError, too
                raise
            except (EOFError, OSError):
                raise ActorDiedError from None

        if method == "load":  # an iterator would not get there
            return lambda manifest, buckets: call(manifest, list(buckets))
        return call

    def kill(self) -> None:
        self._process.end()
        self.dead = True

    dead = False


class Worker(rollout_worker.RolloutWorker):
    """Around an engine that answers one call at a time."""

    def heartbeat(self) -> Heartbeat:
        if self._engine.dead:
            raise ActorDiedError
        return Heartbeat(boot="", pid=0, node="", version=None, log="")


class Rig:
    """Learner ranks (threads, each with the same parameters), their senders, engines, and what is said."""

    def __init__(
        self,
        spec: Any,
        transport: str,
        *,
        ranks: int = 1,
        engines: int = 1,
        tensor_parallel: int = 1,
        dtype: str = "float32",
        probe: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        self.ends, self.warnings, self.probed = ExitStack(), [], probe
        self.config = _unchecked(transport, engines, tensor_parallel, dtype, timeout_s)
        rollout_worker.ray.get = lambda ref: ref
        object_store.ray.put = lambda value: value
        self.engines = []
        for _ in range(engines):
            process = EngineProcess(
                spec,
                slots=8,
                dtype=dtype,
                threads=1,
                timeout_s=240,
                tensor_parallel=tensor_parallel,
            )
            self.engines.append(RemoteEngine(self.ends.enter_context(process)))
        waiting = iter(self.engines)
        rollout_worker.make_engine = lambda *_, **__: next(waiting)
        options: dict[str, Any] = {"kernel": "auto", "threads": 1, "transport": transport}
        workers = [Worker(spec, self.config.rollout, **options) for _ in self.engines]
        tokenizer = load_tokenizer(spec)
        drawn = requests_for(tokenizer, 1, 4, stop_ids=(), ignore_eos=True) if probe else []
        self.requests = requests_for(tokenizer, 3, 2)
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()

        async def start() -> Fleet:
            actors = [LocalActor(worker, threaded=True) for worker in workers]
            fleet = Fleet(actors, self.config.rollout, lambda *_: None)
            await fleet.started()
            return fleet

        self.fleet = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        self.gate = WeightGate(
            self.fleet,
            ranks=ranks,
            timeout_s=timeout_s,
            probe=drawn,
            tolerance=self.config.probe_tolerance,
            floor=ProbeFloor(),
            warn=self.warnings.append,
        )
        self._buckets: set[int] = set()
        self._before_bucket: dict[int, Callable[[], None]] = {}

        def call(message: WeightMessage, _: str) -> Callable[[], Any]:
            if isinstance(message, Put):
                self._buckets.add(message.bucket.number)
                self._before_bucket.pop(message.bucket.number, lambda: None)()
            reply = asyncio.run_coroutine_threadsafe(self.gate.receive(message), loop)
            return lambda: reply.result(90)

        def largest_code(name: str) -> int:
            return 0 if name == "none" else taken(name).weight_max

        self.models = [load_model(spec) for _ in range(ranks)]
        names = units(self.models[0], self.config.quantization.keep)
        self.publishers = [
            Publisher(names, rank=rank, ranks=ranks, bucket_bytes=50_000, tied=tied_head(model))
            for rank, model in enumerate(self.models)
        ]
        prompt = drawn[0].prompt_ids if drawn else None
        self.senders = []
        for model, publisher in zip(self.models, self.publishers, strict=True):
            link = Link(name=transport, publisher=publisher, call=call, host="127.0.0.1", timeout_s=timeout_s)
            self.senders.append(Sender(self.config, self._learner(model), link, largest_code, prompt))

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        self.ends.close()

    def _learner(self, model: Any) -> Any:
        settings = objective_settings(self.config)
        return make_learner(model, self.config.learner, settings, temperature=1.0, total_updates=1)

    def send(self, format_name: str) -> int:
        """All ranks send; the number of buckets that went directly."""
        self._buckets.clear()
        with ThreadPoolExecutor(len(self.senders)) as pool:
            list(pool.map(lambda sender: sender.send(format_name), self.senders))
        return len(self._buckets)

    @torch.no_grad()
    def move(self, by: float = 1e-4) -> None:
        for model in self.models:
            for index, parameter in enumerate(model.parameters()):
                parameter += by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))

    def damage(self) -> None:
        """Flip a bit of the next bucket of rank 0, after it was staged."""
        transport = self.senders[0]._transport
        source = transport._source

        def damaged(memory: torch.Tensor) -> dict:
            memory[0] ^= 1
            del transport._source  # the class's again
            return source(memory)

        transport._source = damaged

    def kill_at_bucket(self, number: int, *, engine: int) -> None:
        self._before_bucket[number] = self.engines[engine].kill

    def fail_at_parameter(self, number: int) -> None:
        """Have rank 0 fail once, after so many parameters."""
        learner = self.senders[0]._learner
        parameters = learner.named_parameters

        def failing() -> Any:
            learner.named_parameters = parameters
            for index, item in enumerate(parameters()):
                yield item if index < number else 1 / 0

        learner.named_parameters = failing

    def answers(self, engine: int) -> list:
        version = self.fleet.version
        found = [self.engines[engine].generate([request], version=version)[0] for request in self.requests]
        return [(c.token_ids.tolist(), c.logprobs.tolist()) for c in found]

    def assert_resident(self, engines: list | None = None) -> None:
        """Every engine holds what the publishers sent, bit for bit."""
        for publisher in self.publishers:
            for bucket in publisher.resend():
                for payload in bucket.payloads:
                    for engine in engines or self.engines:
                        for found, sent in zip(engine.resident(payload.name), payload.parts, strict=True):
                            wide = sent.astype(np.uint32) << 16 if sent.itemsize == 2 else sent
                            assert np.array_equal(found.view(wide.dtype), wide), payload.name


def _unchecked(transport: str, engines: int, tensor_parallel: int, dtype: str, timeout_s: float) -> Any:
    """Settings that would be refused, there being no GPU."""
    config = load_config(None, ["quantization.uaq_scale=1"])
    vllm = config.rollout.vllm.model_copy(update={"tensor_parallel": tensor_parallel})
    rollout = {"engine": "vllm", "workers": engines, "vllm": vllm, "dtype": dtype}
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update=rollout),
            "sync": config.sync.model_copy(update={"transport": transport, "timeout_s": timeout_s, "probe_every": 1}),
        }
    )
