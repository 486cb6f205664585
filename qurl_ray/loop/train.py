"""The learner side of the loop: what every Ray Train rank runs.

    consumes   its share of a step's samples from the coordinator   waits for rollouts and rewards
    produces   weights, quantized at the sender                     waits until every engine has verified them
    ends       after the last step, or before the next one once a stop was asked for

Ranks wait for the coordinator with a deadline of their own, never inside a collective.
"""

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from qurl_ray.config import RunConfig
from qurl_ray.errors import DeadlineExceeded, EngineError, QurlError
from qurl_ray.learner.protocol import Learner
from qurl_ray.learner.torch_backend import TorchLearner
from qurl_ray.loop.coordinator import Offer
from qurl_ray.loop.deadlines import collection_deadline
from qurl_ray.policy.load import load_model, load_tokenizer
from qurl_ray.policy.save import save_policy
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.select import quantized_parameters
from qurl_ray.quant.uaq import fold
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.sync.publish import Publisher
from qurl_ray.types import PolicySpec

_MARGIN_S = 90.0  # the coordinator's own deadlines pass first, and name what is late


def train_loop(context: dict[str, Any]) -> None:
    """Run one rank. `context` holds config (plain values), spec, coordinator and run_dir."""
    config = RunConfig.model_validate(context["config"])
    rank = ray.train.get_context().get_world_rank()
    ranks = ray.train.get_context().get_world_size()
    torch.set_num_threads(config.learner.threads or max(1, (os.cpu_count() or 1) // ranks))
    torch.manual_seed(config.seed)
    model = load_model(context["spec"])
    if config.quantization.uaq_scale != 1:
        fold(model, config.quantization.uaq_scale, config.quantization.uaq_layers)
    learner = TorchLearner(
        model,
        config.learner,
        objective_settings(config),
        temperature=config.rollout.temperature,
        total_updates=config.steps * config.algorithm.updates_per_rollout,
    )
    names = quantized_parameters(model, config.quantization.keep) if config.rollout.quantization != "none" else set()
    coordinator = context["coordinator"]
    start = config.rollout.start_timeout_s
    weight_max_code = _wait(coordinator.weight_max_code.remote(), start, "the rollout workers to start")
    publisher = Publisher(quantized=names, rank=rank, ranks=ranks)
    sender = Sender(config, learner, publisher, coordinator, weight_max_code)
    saver = Saver(config, model, context["spec"], Path(context["run_dir"])) if rank == 0 else None

    quantized = config.rollout.quantization != "none"
    sender.send("none")
    if rank == 0:
        _evaluate(config, coordinator, "before", 0)
    if quantized:
        sender.send(config.rollout.quantization)
    done = 0
    for step in range(1, config.steps + 1):
        if not _one_step(config, learner, sender, coordinator, step=step, rank=rank):
            break
        done = step
        if saver and config.checkpoint.every and step % config.checkpoint.every == 0:
            saver.checkpoint(step)
        if rank == 0 and config.evaluation.every and step % config.evaluation.every == 0:
            _evaluate(config, coordinator, "during", step)
    if saver:
        saver.final()  # before anything else can fail
    if rank == 0 and quantized:
        _evaluate(config, coordinator, "after, quantized", done)
    if quantized:
        sender.send("none")
    if rank == 0:
        _evaluate(config, coordinator, "after", done)
    # Once, not per step: reporting is a barrier that costs about a second, and the coordinator carries the metrics.
    ray.train.report({"steps": done})


def _one_step(
    config: RunConfig, learner: Learner, sender: "Sender", coordinator: ActorHandle, *, step: int, rank: int
) -> bool:
    """Rollouts in, update, weights out. False if the run was asked to stop before this step."""
    started = time.perf_counter()
    mini_batches = _wait(
        coordinator.share.remote(step, rank), collection_deadline(config), f"rollouts and rewards of step {step}"
    )
    if mini_batches is None:
        return False
    result = learner.learn(mini_batches)
    seconds = {"sync": sender.send(config.rollout.quantization) if mini_batches else 0.0}
    seconds["step"] = time.perf_counter() - started
    _wait(coordinator.report.remote(step, result, seconds), config.sync.timeout_s, f"the report of step {step}")
    return True


class Sender:
    """Sends this rank's part of each version and waits until the engines have verified the whole."""

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        publisher: Publisher,
        coordinator: ActorHandle,
        weight_max_code: int,
    ) -> None:
        self._config, self._learner, self._publisher = config, learner, publisher
        self._coordinator, self._weight_max_code = coordinator, weight_max_code
        self._version = 0

    def send(self, format_name: str) -> float:
        """Send the weights as they are now. Returns the seconds it took, verification included."""
        started = time.perf_counter()
        self._version += 1
        fmt = None if format_name == "none" else get_format(format_name, self._weight_max_code)
        part = self._publisher.prepare(self._learner.named_parameters(), fmt)
        offer = Offer(
            version=self._version,
            rank=self._publisher.rank,
            format=format_name,
            weight_max_code=fmt.weight_max if fmt else None,
            records=part.records,
            codes=part.codes,
            codes_changed=part.codes_changed,
        )
        call = self._coordinator.offer.remote(offer, [ray.put(part.buffers)])
        # The last rank's part may come late: rank 0 evaluates between two versions.
        limit = self._config.sync.timeout_s + collection_deadline(self._config)
        _wait(call, limit, f"the engines to verify weights {self._version}")
        return time.perf_counter() - started


class Saver:
    """Writes policies into the run's folder; rank 0 only."""

    def __init__(self, config: RunConfig, model: torch.nn.Module, spec: PolicySpec, run_dir: Path) -> None:
        self._config, self._model, self._run_dir = config, model, run_dir
        self._tokenizer = load_tokenizer(spec)

    def checkpoint(self, step: int) -> None:
        """checkpoints/step-<n>, and drop all but the latest `checkpoint.keep`."""
        root = self._run_dir / "checkpoints"
        self._save(root / f"step-{step:06d}")
        for old in sorted(root.glob("step-*"))[: -self._config.checkpoint.keep]:
            shutil.rmtree(old)

    def final(self) -> None:
        """policy/"""
        self._save(self._run_dir / "policy")

    def _save(self, folder: Path) -> None:
        quantization = self._config.quantization
        save_policy(
            self._model,
            self._tokenizer,
            folder,
            uaq_scale=quantization.uaq_scale,
            uaq_layers=quantization.uaq_layers,
        )


def objective_settings(config: RunConfig) -> ObjectiveSettings:
    """The values of the algorithm section that the objective needs."""
    algorithm = config.algorithm
    return ObjectiveSettings(
        correction=algorithm.correction.type,
        is_cap=math.inf if algorithm.correction.type == "ignore" else algorithm.correction.is_cap,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        loss_mean=algorithm.loss_mean,
    )


def _evaluate(config: RunConfig, coordinator: ActorHandle, label: str, step: int) -> None:
    _wait(coordinator.evaluate.remote(label, step), collection_deadline(config), f"the evaluation {label!r}")


def _wait(call: ray.ObjectRef, timeout_s: float, what: str) -> Any:
    try:
        return ray.get(call, timeout=timeout_s + _MARGIN_S)
    except GetTimeoutError:
        raise DeadlineExceeded(f"waited {timeout_s + _MARGIN_S:g} s for {what}") from None
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, QurlError) else error) from None
    except RayActorError as error:
        raise EngineError(f"the coordinator died during {what}: {error}") from None
