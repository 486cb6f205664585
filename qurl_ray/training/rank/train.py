"""Learner side of the loop: the code that every Ray Train rank runs.

    consumes   its share of a step's samples from the coordinator   waits for rollouts and rewards
    produces   weights, quantized at the sender                     waits until every engine has verified them
    ends       after the last step, or before the next one once a stop was requested or the reward's target is reached

Ranks wait for the coordinator with a deadline of their own, never inside a collective. If one of them dies, Ray Train
restarts all of them, and they resume from the latest checkpoint.
"""

import os
import socket
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from torch import distributed
from torch.distributed import DistError

from qurl_ray.actors.cluster import own_assignment
from qurl_ray.config import RunConfig
from qurl_ray.errors import ConfigError, CoordinatorDied, DeadlineExceeded, QurlError
from qurl_ray.learner.equalizer import equalizer_for
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.learner.protocol import Learner
from qurl_ray.policy.experts import router_weights
from qurl_ray.policy.load import StoredWeights, files_digest, load_model, tied_head, unloaded_model
from qurl_ray.quant.uaq import fold
from qurl_ray.quant.units import Unit, units
from qurl_ray.runs.checkpoint import Checkpoint
from qurl_ray.spans import STEPS, Spans, rank_lane
from qurl_ray.training.deadlines import Watchdog, collection_deadline, sync_deadline
from qurl_ray.training.messages import Directive, Start, WeightsWanted
from qurl_ray.training.rank.adapters import adaptation, tell_adapters, with_adapters
from qurl_ray.training.rank.gpu_turns import Turn, Turns
from qurl_ray.training.rank.host_memory import check_memory, tell_memory
from qurl_ray.training.rank.objectives import credit, needs_value_model, objective_settings, penalty, tightened
from qurl_ray.training.rank.precision import fleet_weight_max_code, tell_gradients, unified_flow
from qurl_ray.training.rank.saver import Saver, barrier, check_shared
from qurl_ray.training.rank.wait import wait
from qurl_ray.types import Event, PolicySpec
from qurl_ray.weights.messages import WeightMessage
from qurl_ray.weights.sender import Sender
from qurl_ray.weights.stream import Publisher
from qurl_ray.weights.transports.protocol import Link

_FAIL_S = 30.0
_RETRY_S = 0.5
_SAVE_S = 3600.0  # hundreds of gigabytes on a slow disk


def train_loop(context: dict[str, Any]) -> None:
    """Run one rank: make its parts from the settings, then take step after step. The one function in which all parts of
    a rank meet.

    Args:
        context: config (plain values), spec, run_dir, and references to the coordinator and the TaskInputs.
    """
    config, run_dir = RunConfig.model_validate(context["config"]), Path(context["run_dir"])
    check_shared(run_dir)
    rank = ray.train.get_context().get_world_rank()
    ranks = ray.train.get_context().get_world_size()
    torch.set_num_threads(config.learner.threads or max(1, (os.cpu_count() or 1) // ranks))
    torch.manual_seed(config.seed)
    coordinator = _coordinator(context)
    ask = partial(coordinator.begin.remote, rank, _group(), context["inputs"], own_assignment())
    start = _begin(ask, config.learner.timeout_s + config.rollout.start_limit_s)
    if start.over:
        return
    spec: PolicySpec = context["spec"]

    def tell(stage: str) -> None:
        if rank == 0:
            coordinator.tell.remote(Event(kind="phase", step=start.resume.step if start.resume else 0, message=stage))

    def late(error: DeadlineExceeded) -> None:  # this rank may never end: the driver ends the run
        coordinator.fail.remote(DeadlineExceeded(f"rank {rank} of the learner, {error}"))

    watchdog = Watchdog(late=late, folder=run_dir / "logs")
    tell("loading the policy into the learner's ranks")
    with watchdog.during("loading the policy", config.learner.timeout_s):
        check_same_files(spec)
        fit = check_memory(config, ray.train.get_context().get_local_world_size())
        if fit and rank == 0:
            tell_memory(fit, config, coordinator)
        learner, publisher = _load_policy(config, spec, start, coordinator, watchdog)
    prompt = wait(coordinator.probe_prompt.remote(), config.sync.timeout_s, "the prompt of the engines' probe")
    several = sum(node["Alive"] for node in ray.nodes()) > 1
    link = Link(
        name=config.sync.transport,
        publisher=publisher,
        call=partial(_call, coordinator, sync_deadline(config)),
        host=ray.util.get_node_ip_address(),
        timeout_s=config.sync.timeout_s,
    )
    largest = partial(fleet_weight_max_code, config, coordinator)
    sender = Sender(config, learner, link, largest, prompt, start.version, across_nodes=several)
    saver = Saver(config, learner, spec, coordinator, run_dir, rank)
    turns = Turns(
        learner,
        coordinator,
        colocated=config.placement == "colocated",
        offload=bool(config.learner.offload_while_waiting),
        together=fit is not None and fit.together,
        timeout_s=config.sync.timeout_s,
    )
    loop = RankLoop(config, learner, sender, turns, coordinator, rank, start.directive, watchdog)
    tell("waiting for the engines to start, and sending the first weights")
    done = loop.run(start.resume, saver, tell)
    for event in loop.spans.events():
        wait(coordinator.tell.remote(event), config.sync.timeout_s, "the coordinator to take the last spans")
    # Once, not per step: reporting is a barrier that costs about a second, and the coordinator carries the metrics.
    ray.train.report({"steps": done})


def _load_policy(
    config: RunConfig, spec: PolicySpec, start: Start, coordinator: ActorHandle, watchdog: Watchdog
) -> tuple[PolicyLearner, Publisher]:
    """Load the policy, and return its learner and the publisher of its weights."""
    rank, ranks = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    lora, algorithm, quantization = config.learner.lora, config.algorithm, config.quantization
    sharded = config.learner.backend == "fsdp" and not lora  # whose codes are made from whole weights
    load = unloaded_model if sharded else load_model
    model = load(spec)
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: watchdog.progress())
    tied, exact = tied_head(model), router_weights(model)
    rollouts, exported = config.rollout.quantization, config.export.format(config.rollout.quantization)
    quantized: dict[str, Unit] = {}
    if rollouts != "none" or exported != "none":
        quantized = units(model, quantization.kept(model.config.num_hidden_layers))  # before a backend wraps it
    folded = quantization.uaq_scale != 1
    if folded and not sharded:
        fold(model, quantization.uaq_scale, quantization.uaq_layers)
    # These two are never quantized, so they are not folded.
    value_body = load(spec) if needs_value_model(algorithm) else None
    reference = load(spec) if algorithm.kl_coef and not lora else None
    settings = objective_settings(config)
    flow = unified_flow(config, coordinator, quantized)
    if flow and rank == 0 and not lora:
        tell_gradients(flow, config, coordinator)
    device = config.learner.device
    equalizer = equalizer_for(model, quantization, quantized, {rollouts, exported} - {"none"}, device=device)
    prepared = None
    if lora:
        prepared = adaptation(model, spec, config, flow, quantized, start.resume)
        if value_body:
            with_adapters(value_body, config)
        if prepared.frozen:
            flow = equalizer = None
        if rank == 0:
            tell_adapters(model, prepared, coordinator)
    learner = make_learner(
        model,
        config.learner,
        tightened(settings) if start.directive.tighten else settings,
        temperature=config.rollout.temperature,
        total_updates=config.steps * algorithm.updates_per_rollout,
        credit=credit(algorithm),
        value_body=value_body,
        reference=reference,
        penalty=penalty(algorithm),
        flow=flow,
        equalizer=equalizer,
        adaptation=prepared,
        calibrate_every=algorithm.calibrate_every,
        replay_reference=config.rollout.router_replay == "always",
        rows=StoredWeights(spec, model).rows if sharded else None,
    )
    if folded and sharded:  # its weights have been read now
        fold(model, quantization.uaq_scale, quantization.uaq_layers)
    publisher = Publisher(
        quantized=quantized,
        rank=rank,
        ranks=ranks,
        bucket_bytes=config.sync.bucket_mb << 20,
        tied=tied,
        exact=exact,
    )
    return learner, publisher


def check_same_files(spec: PolicySpec) -> None:
    """Raise ConfigError, on every rank, unless all see the same files of the policy. Collective."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    try:
        mine = files_digest(spec)
    except ConfigError as error:
        mine = str(error)
    digests: list[tuple[str, str]] = [("", "")] * distributed.get_world_size()
    distributed.all_gather_object(digests, (mine, socket.gethostname()))
    if len({digest for digest, _ in digests}) > 1:
        seen = "; ".join(f"rank {rank} on {host}: {digest}" for rank, (digest, host) in enumerate(digests))
        raise ConfigError(
            f"model: the learner's ranks see different files in {spec.source} ({seen}): put the policy on storage that "
            "all nodes share, or the same revision on each"
        )


def fail(context: dict[str, Any], error: QurlError) -> None:
    """Report this error to the coordinator, which ends the run."""
    wait(_coordinator(context).fail.remote(error), _FAIL_S, "the coordinator to take an error")
    if ray.train.get_context().get_world_size() > 1:
        raise error  # or the other ranks would wait for this one


def repeated(context: dict[str, Any], error: Exception) -> QurlError | None:
    """Report an error that is not ours to the coordinator. Return the error that ends the run if this rank had the
    reported one, in the same step, before it was restarted; else None."""
    if isinstance(error, RayError):
        elsewhere = not isinstance(error, RayTaskError)
    else:
        elsewhere = isinstance(error, DistError) or "gloo" in str(error)  # whose errors are plain RuntimeErrors
    if elsewhere:  # another process ended, or does not answer: the next time it may
        return None
    path = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    file, line = path[-1]
    told = f"{type(error).__name__}: {error} ({file}, line {line})"
    call = _coordinator(context).crashed.remote(
        ray.train.get_context().get_world_rank(), repr((type(error), path)), told
    )
    return wait(call, _FAIL_S, "the coordinator to take an error")


def _coordinator(context: dict[str, Any]) -> ActorHandle:
    (handle,) = context["coordinator"]
    return wait(handle, _FAIL_S, "the coordinator's handle")


class RankLoop:
    """Loop of one rank: gets samples and evaluations from the coordinator, learns, and sends weights."""

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        sender: Sender,
        turns: Turns,
        coordinator: ActorHandle,
        rank: int,
        directive: Directive,
        watchdog: Watchdog,
    ) -> None:
        self._config, self._learner, self._sender, self._coordinator = config, learner, sender, coordinator
        self._watchdog = watchdog
        self._turns, self._rank, self._directive = turns, rank, directive
        self._resent = 0
        """Number of calls that were answered with WeightsWanted."""
        self.spans = Spans()

    def run(self, resume: Checkpoint | None, saver: Saver, tell: Callable[[str], None]) -> int:
        """Send the first weights, take all steps, save the policy and evaluate it. Return the number of steps done."""
        config, rollouts = self._config, self._config.rollout.quantization
        if resume:
            self._learner.load(resume.learner)
            barrier()
            self.send("none" if self._directive.full_precision else rollouts)
        else:
            first = "none" if config.evaluates_full_precision else rollouts
            self.send(first)
            self.evaluate("before", 0)
            if rollouts != first:
                self.send(rollouts)
        done = saved = resume.step if resume else 0
        tell(f"step {done + 1}")
        for step in range(done + 1, config.steps + 1):
            if not self.step(step):
                break
            done, reward = step, None
            if config.evaluation.every and step % config.evaluation.every == 0:
                reward = self.evaluate("during", step)
            if config.checkpoint.every and step % config.checkpoint.every == 0:
                with self.saving():
                    saver.checkpoint(step, reward)
                saved = step
        with self.saving():
            if saved < done < config.steps:  # the run ends early: the same command resumes from here
                saver.checkpoint(done, None)
            if done:
                saver.final()  # before anything else can fail
        if done:
            self.last_evaluations(done)
        return done

    def spanning(self, name: str) -> AbstractContextManager:
        """Record the block as a span of this rank, for the timeline."""
        return self.spans.during(rank_lane(self._rank), name)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Record the block as a writing of a checkpoint or the policy, which needs the learner on its GPU."""
        self._turns.take(Turn.LEARN)
        limit_s = max(self._config.learner.timeout_s, _SAVE_S)
        with self._watchdog.during("writing a checkpoint", limit_s), self.spanning("checkpoint"):
            yield

    def step(self, step: int) -> bool:
        """Make one step: rollouts in, update, weights out. Returns False if the run ends before this step."""
        config, limit = self._config, self._config.sync.timeout_s
        started = time.perf_counter()
        share = partial(self._coordinator.share.remote, step, self._rank)
        mini_batches = self._attend(share, f"rollouts and rewards of step {step}")
        waited = time.perf_counter() - started
        if mini_batches is None:
            return False
        self.spans.step = step
        self._turns.take(Turn.LEARN)
        with self._watchdog.during(f"learning in step {step}", config.learner.timeout_s):
            result = self._learner.learn(mini_batches)
        self.spans.phases(rank_lane(self._rank), result.seconds)
        self._turns.take(Turn.SYNC)
        call = self._coordinator.report.remote(step, self._rank, result)
        directive: Directive = wait(call, limit, f"the report of step {step}")
        if directive.tighten != self._directive.tighten:
            settings = objective_settings(config)
            self._learner.adopt(tightened(settings) if directive.tighten else settings)
        self._directive = directive
        rollouts = "none" if directive.full_precision else config.rollout.quantization
        lora = config.learner.lora
        moved = bool(mini_batches) or self._sender.sent != rollouts or bool(lora and lora.noise)
        seconds, figures, certified = {"wait": waited}, dict[str, float](), time.perf_counter()
        every = config.evaluation.certificate.every
        if every and step % every == 0 and rollouts != "none":
            figures, seconds["sync"] = self.certify(step, rollouts)
            seconds["certificate"] = time.perf_counter() - certified - seconds["sync"]
        else:
            seconds["sync"] = self.send(rollouts) if moved else 0.0
        seconds["step"] = time.perf_counter() - started
        if config.learner.offload_while_waiting:
            seconds["turns"], self._turns.seconds = self._turns.seconds, 0.0
        if self._rank == 0:
            self.spans.past(STEPS, "step", seconds["step"])
        call = self._coordinator.close.remote(step, self._rank, seconds, figures, self.spans.events())
        wait(call, limit, f"the end of step {step}")
        return True

    def send(self, format_name: str) -> float:
        """Send the current weights to the engines. Returns the seconds it took, verification included."""
        self._turns.take(Turn.SYNC)
        with self.spanning("sync"):
            return self._sender.send(format_name)

    def certify(self, step: int, rollouts: str) -> tuple[dict[str, float], float]:
        """Have engines answer the problems of a step's certificate in full precision, then with the weights of the next
        rollouts. Return figures of the gradients, if this learner compares them, and the seconds of the last sync."""
        shares = {}
        for format_name in ("none", rollouts):
            synced = self.send(format_name)
            ask = partial(self._coordinator.certify.remote, step, self._rank, format_name)
            shares[format_name] = self._attend(ask, f"the certificate of step {step}")
        self._turns.take(Turn.LEARN)
        with self._watchdog.during(f"certificate of step {step}", self._config.learner.timeout_s):
            figures = self._learner.compare_gradients(shares["none"], shares[rollouts])
        self._turns.take(Turn.SYNC)
        return figures, synced

    def evaluate(self, label: str, step: int) -> float:
        """Return the mean held-out reward of the weights that the engines hold."""
        return self._attend(partial(self._coordinator.evaluate.remote, label, step), f"the evaluation {label!r}")

    def last_evaluations(self, done: int) -> None:
        """Evaluate the quantized policy, if there is one, then the one in full precision if that is asked for. The
        engines already hold the first if the export's format is the rollouts'."""
        noisy = self._learner.end_noise()
        formats = {"after, quantized": self._config.evaluated_format}
        if self._config.evaluates_full_precision or formats["after, quantized"] == "none":
            formats["after"] = "none"
        for label, format_name in formats.items():
            if label == "after" or format_name != "none":
                if noisy or self._sender.sent != format_name:
                    self.send(format_name)
                    noisy = False
                self.evaluate(label, done)

    def _attend(self, ask: Callable[[int], ObjectRef], goal: str) -> Any:
        """Return the coordinator's answer. Each time it is WeightsWanted instead, resend the weights and repeat the
        call."""
        while True:
            self._turns.take(Turn.ROLLOUTS)
            answer = wait(ask(self._resent), collection_deadline(self._config), goal)
            if not isinstance(answer, WeightsWanted):
                return answer
            self._resent += 1
            self._turns.take(Turn.SYNC)
            with self.spanning("sync"):
                self._sender.resend()


def _call(coordinator: ActorHandle, timeout_s: float, message: WeightMessage, work: str) -> Callable[[], Any]:
    """Send a message about weights. Returns a function that waits for the reply."""
    call = coordinator.weights.remote(message)
    return lambda: wait(call, timeout_s, f"the engines to {work}")


def _begin(ask: Callable[[], ObjectRef], timeout_s: float) -> Start:
    """Return the coordinator's answer to `begin`. If the coordinator has died, wait until it has restarted."""
    ends = time.monotonic() + timeout_s
    while True:
        try:
            return wait(ask(), timeout_s, "the other ranks to begin")
        except CoordinatorDied:
            if time.monotonic() > ends:
                raise
            time.sleep(_RETRY_S)


def _group() -> str:
    """Name that these ranks share, and no other group of the run has."""
    names = [uuid.uuid4().hex]
    if distributed.is_initialized():
        distributed.broadcast_object_list(names)
    return names[0]
