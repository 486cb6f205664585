"""The learner side of the loop: what every Ray Train rank runs.

    consumes   its share of a step's samples from the coordinator   waits for rollouts and rewards
    produces   weights, quantized at the sender                     waits until every engine has verified them
    ends       after the last step, or before the next one once a stop was asked for or the reward's target is reached

Ranks wait for the coordinator with a deadline of their own, never inside a collective. After one of them died, Ray
Train starts all anew, and they go on from the latest checkpoint.
"""

import json
import os
import shutil
import time
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
from safetensors import SafetensorError
from torch import distributed

from qurl_ray.actors.cluster import own_seat
from qurl_ray.actors.spans import STEPS, Spans, rank_lane
from qurl_ray.config import RunConfig
from qurl_ray.errors import CheckpointError, CoordinatorDied, QurlError
from qurl_ray.learner.learner import make_learner
from qurl_ray.learner.protocol import Learner
from qurl_ray.loop.checkpoint import complete, partial_folder, prune
from qurl_ray.loop.coordinator import Start, WeightsWanted
from qurl_ray.loop.deadlines import collection_deadline
from qurl_ray.loop.guard import Directive
from qurl_ray.loop.objectives import credit, needs_value_model, objective_settings, penalty, tightened
from qurl_ray.loop.run_dir import check_shared
from qurl_ray.loop.sender import Sender, unified_flow, weight_max_code
from qurl_ray.loop.turns import Turn, Turns
from qurl_ray.loop.wait import wait
from qurl_ray.policy.export import save_quantized
from qurl_ray.policy.load import load_model, load_tokenizer, tied_head
from qurl_ray.policy.save import save_policy
from qurl_ray.quant.experiments import Rounding
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.select import quantized_parameters
from qurl_ray.quant.uaq import fold, unfold
from qurl_ray.sync.publish import Publisher
from qurl_ray.types import PolicySpec

_FAIL_S = 30.0
_RETRY_S = 0.5


def train_loop(context: dict[str, Any]) -> None:
    """Run one rank. `context` holds config (plain values), spec, coordinator, task (both references) and run_dir."""
    config = RunConfig.model_validate(context["config"])
    check_shared(Path(context["run_dir"]))
    rank = ray.train.get_context().get_world_rank()
    ranks = ray.train.get_context().get_world_size()
    torch.set_num_threads(config.learner.threads or max(1, (os.cpu_count() or 1) // ranks))
    torch.manual_seed(config.seed)
    coordinator = _coordinator(context)
    ask = partial(coordinator.begin.remote, rank, _group(), context["task"], own_seat())
    start = _begin(ask, config.learner.timeout_s + config.rollout.start_timeout_s)
    if start.over:
        return
    model = load_model(context["spec"])
    rollouts, resume = config.rollout.quantization, start.resume
    names, tied = set(), tied_head(model)
    if rollouts != "none" or config.export.format(rollouts) != "none":
        kept = config.quantization.kept(model.config.num_hidden_layers)
        names = quantized_parameters(model, kept)  # before a backend wraps it
    if config.quantization.uaq_scale != 1:
        fold(model, config.quantization.uaq_scale, config.quantization.uaq_layers)
    # Neither is ever quantized, so neither is folded.
    value_body = load_model(context["spec"]) if needs_value_model(config.algorithm) else None
    reference = load_model(context["spec"]) if config.algorithm.kl_coef else None
    settings = objective_settings(config)
    learner = make_learner(
        model,
        config.learner,
        tightened(settings) if start.directive.tighten else settings,
        temperature=config.rollout.temperature,
        total_updates=config.steps * config.algorithm.updates_per_rollout,
        credit=credit(config.algorithm),
        value_body=value_body,
        reference=reference,
        penalty=penalty(config.algorithm),
        flow=unified_flow(config, coordinator, names),
        calibrate_every=config.algorithm.calibrate_every,
    )
    publisher = Publisher(quantized=names, rank=rank, ranks=ranks, bucket_bytes=config.sync.bucket_mb << 20, tied=tied)
    if config.quantization.rounding != "nearest":
        publisher.quantizer = Rounding(config.quantization.rounding, config.seed)
    prompt = wait(coordinator.probe_prompt.remote(), config.sync.timeout_s, "the prompt of the engines' probe")
    sender = Sender(config, learner, publisher, coordinator, prompt, start.version)
    saver = Saver(config, learner, context["spec"], coordinator, Path(context["run_dir"]), rank)
    turns = Turns(config, learner, coordinator)
    ranks_end = RankEnd(config, learner, sender, turns, coordinator, rank, start.directive)

    if resume:
        learner.load(resume.learner)
        _barrier()
        ranks_end.send("none" if start.directive.full_precision else rollouts)
    else:
        ranks_end.send("none")
        ranks_end.evaluate("before", 0)
        if rollouts != "none":
            ranks_end.send(rollouts)
    done = saved = resume.step if resume else 0
    for step in range(done + 1, config.steps + 1):
        if not ranks_end.step(step):
            break
        done, reward = step, None
        if config.evaluation.every and step % config.evaluation.every == 0:
            reward = ranks_end.evaluate("during", step)
        if config.checkpoint.every and step % config.checkpoint.every == 0:
            turns.take(Turn.LEARN)
            with ranks_end.spanning("checkpoint"):
                saver.checkpoint(step, reward)
            saved = step
    turns.take(Turn.LEARN)
    with ranks_end.spanning("checkpoint"):
        if saved < done < config.steps:  # the run ends early: after a stop, the same command goes on from here
            saver.checkpoint(done, None)
        saver.final()  # before anything else can fail
    ranks_end.last_evaluations(done)
    for event in ranks_end.spans.events():
        wait(coordinator.tell.remote(event), config.sync.timeout_s, "the coordinator to take the last spans")
    # Once, not per step: reporting is a barrier that costs about a second, and the coordinator carries the metrics.
    ray.train.report({"steps": done})


def fail(context: dict[str, Any], error: QurlError) -> None:
    """End the run with this error."""
    wait(_coordinator(context).fail.remote(error), _FAIL_S, "the coordinator to take an error")
    if ray.train.get_context().get_world_size() > 1:
        raise error  # or the other ranks would wait for this one


def _coordinator(context: dict[str, Any]) -> ActorHandle:
    (handle,) = context["coordinator"]
    return wait(handle, _FAIL_S, "the coordinator's handle")


class RankEnd:
    """A rank's end of the loop: asks the coordinator for what takes rollouts, learns, and sends weights."""

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        sender: Sender,
        turns: Turns,
        coordinator: ActorHandle,
        rank: int,
        directive: Directive,
    ) -> None:
        self._config, self._learner, self._sender, self._coordinator = config, learner, sender, coordinator
        self._turns, self._rank, self._directive = turns, rank, directive
        self._resent = 0
        """How often weights were wanted in place of an answer."""
        self.spans = Spans()

    def spanning(self, name: str) -> AbstractContextManager:
        """What this rank does in the block, for the timeline."""
        return self.spans.during(rank_lane(self._rank), name)

    def step(self, step: int) -> bool:
        """Rollouts in, update, weights out. False if the run ends before this step."""
        config, limit = self._config, self._config.sync.timeout_s
        started = time.perf_counter()
        share = partial(self._coordinator.share.remote, step, self._rank)
        mini_batches = self._attend(share, f"rollouts and rewards of step {step}")
        waited = time.perf_counter() - started
        if mini_batches is None:
            return False
        self.spans.step = step
        self._turns.take(Turn.LEARN)
        result = self._learner.learn(mini_batches)
        self.spans.phases(rank_lane(self._rank), result.seconds)
        self._turns.take(Turn.SYNC)
        call = self._coordinator.report.remote(step, self._rank, result)
        self._follow(wait(call, limit, f"the report of step {step}"))
        rollouts = "none" if self._directive.full_precision else config.rollout.quantization
        moved = bool(mini_batches) or self._sender.sent != rollouts
        seconds = {"wait": waited, "sync": self.send(rollouts) if moved else 0.0}
        seconds["step"] = time.perf_counter() - started
        if config.learner.offload_while_waiting:
            seconds["turns"], self._turns.seconds = self._turns.seconds, 0.0
        if self._rank == 0:
            self.spans.past(STEPS, "step", seconds["step"])
        call = self._coordinator.close.remote(step, self._rank, seconds, self.spans.events())
        wait(call, limit, f"the end of step {step}")
        return True

    def send(self, format_name: str) -> float:
        """Give the engines the weights as they are now. Returns the seconds it took, verification included."""
        self._turns.take(Turn.SYNC)
        with self.spanning("sync"):
            return self._sender.send(format_name)

    def evaluate(self, label: str, step: int) -> float:
        """Mean held-out reward of what the engines hold."""
        return self._attend(partial(self._coordinator.evaluate.remote, label, step), f"the evaluation {label!r}")

    def last_evaluations(self, done: int) -> None:
        """The quantized policy first: the engines hold it already, if the export's format is the rollouts'."""
        exported = self._config.export.format(self._config.rollout.quantization)
        quantized = exported if exported != "none" else self._config.rollout.quantization
        for format_name, label in ((quantized, "after, quantized"), ("none", "after")):
            if label == "after" or format_name != "none":
                if self._sender.sent != format_name:
                    self.send(format_name)
                self.evaluate(label, done)

    def _follow(self, directive: Directive) -> None:
        """Train as the guard wants it from now on."""
        if directive.tighten != self._directive.tighten:
            settings = objective_settings(self._config)
            self._learner.adopt(tightened(settings) if directive.tighten else settings)
        self._directive = directive

    def _attend(self, ask: Callable[[int], ObjectRef], what: str) -> Any:
        """The coordinator's answer. Engines that wait for weights meanwhile are given them."""
        while True:
            self._turns.take(Turn.ROLLOUTS)
            found = wait(ask(self._resent), collection_deadline(self._config), what)
            if not isinstance(found, WeightsWanted):
                return found
            self._resent += 1
            self._turns.take(Turn.SYNC)
            with self.spanning("sync"):
                self._sender.resend()


class Saver:
    """Writes checkpoints and policies into the run's folder. Every rank calls the same methods: a sharded learner's
    parameters are gathered by all."""

    def __init__(
        self, config: RunConfig, learner: Learner, spec: PolicySpec, coordinator: ActorHandle, run_dir: Path, rank: int
    ) -> None:
        self._config, self._learner, self._coordinator = config, learner, coordinator
        self._run_dir, self._rank = run_dir, rank
        # What is saved is filled in from the learner each time: the learner's own may be sharded, and is folded.
        self._policy = load_model(spec).requires_grad_(False) if rank == 0 else None
        self._tokenizer = load_tokenizer(spec)

    def checkpoint(self, step: int, reward: float | None) -> None:
        """checkpoints/step-<n>; older ones are dropped as the settings say."""
        partial = partial_folder(self._run_dir, step)
        with _writing(f"the checkpoint of step {step}", partial.parent):
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                (partial / "learner").mkdir(parents=True)
            _barrier()
            self._learner.save(partial / "learner")
            self._gather()
            if self._rank == 0:
                self._save_policy(partial / "policy")
                call = self._coordinator.state.remote(step)
                state = wait(call, self._config.sync.timeout_s, "the coordinator's state")
                (partial / "loop.json").write_text(json.dumps(state))
            _barrier()  # every rank's files are there
            if self._rank == 0:
                complete(partial, step=step, reward=reward)
                prune(self._run_dir, self._config.checkpoint.keep)
        _barrier()  # no rank asks for the next step's rollouts before the coordinator's state is on disk

    def final(self) -> None:
        """policy/, and policy-<format>/ if one is exported."""
        self._gather()
        if self._policy is None:
            return
        exported = self._config.export.format(self._config.rollout.quantization)
        with _writing("the final policy", self._run_dir):
            try:
                if exported != "none":
                    self._save_quantized(exported)
            finally:  # whatever becomes of the export
                self._save_policy(self._run_dir / "policy")

    def _save_quantized(self, format_name: str) -> None:
        """As it is, folded: its codes are then those that the engines hold and that the evaluation judges."""
        fmt = get_format(format_name, weight_max_code(self._config, self._coordinator, format_name))
        assert self._policy, "rank 0 saves"
        folder = self._run_dir / f"policy-{format_name}"
        kept = self._config.quantization.kept(self._policy.config.num_hidden_layers)
        save_quantized(self._policy, self._tokenizer, folder, fmt, kept)

    @torch.no_grad()
    def _gather(self) -> None:
        """Fill rank 0's policy from the learner. Collective."""
        own = dict(self._policy.named_parameters()) if self._policy is not None else {}
        for name, parameter in self._learner.named_parameters():
            if own:
                own[name].copy_(parameter)

    def _save_policy(self, folder: Path) -> None:
        assert self._policy is not None, "rank 0 only"
        quantization = self._config.quantization
        if quantization.uaq_scale != 1:
            unfold(self._policy, quantization.uaq_scale, quantization.uaq_layers)
        save_policy(self._policy, self._tokenizer, folder)


@contextmanager
def _writing(what: str, folder: Path) -> Iterator[None]:
    """Turn the many errors of a full or lost disk into one that says what could not be written, and where."""
    try:
        yield
    except QurlError:  # a deadline is an OSError, too
        raise
    except (OSError, SafetensorError, RuntimeError) as error:  # torch and DeepSpeed raise the last
        raise CheckpointError(
            f"{what} cannot be written to {folder}: {error}; what is complete there is kept"
        ) from error


def _barrier() -> None:
    if distributed.is_initialized():
        distributed.barrier()


def _begin(ask: Callable[[], ObjectRef], timeout_s: float) -> Start:
    """What this rank is told at its beginning. A coordinator that died is waited for: it is being started anew."""
    ends = time.monotonic() + timeout_s
    while True:
        try:
            return wait(ask(), timeout_s, "the other ranks to begin")
        except CoordinatorDied:
            if time.monotonic() > ends:
                raise
            time.sleep(_RETRY_S)


def _group() -> str:
    """A name that these ranks share, and no other group of the run has."""
    names = [uuid.uuid4().hex]
    if distributed.is_initialized():
        distributed.broadcast_object_list(names)
    return names[0]
