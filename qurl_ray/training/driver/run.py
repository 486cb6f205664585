"""The driver: starts the actors, runs the learner, watches the run and reports on it.

`run()` creates the rollout workers and the coordinator, and passes the coordinator's handle to Ray Train. Actors that
the driver creates outlive a train worker; actors created inside a train worker would die with it.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ray
import ray.train
import torch
from ray.actor import ActorHandle
from ray.train.torch import TorchConfig, TorchTrainer

from qurl_ray.actors.cluster import attach, check_room, last_lines, start
from qurl_ray.actors.environments import end_environments, start_environments
from qurl_ray.actors.placement import demand
from qurl_ray.actors.verifier import VerifierPool, start_verifiers
from qurl_ray.actors.worker_group import WorkerGroup
from qurl_ray.config import RunConfig
from qurl_ray.config.idle import idle_settings
from qurl_ray.config.model import ModelConfig, TinyModel
from qurl_ray.environment import MEMORY
from qurl_ray.errors import DeadlineExceeded
from qurl_ray.numerics.selfcheck import VARIABLES
from qurl_ray.policy.load import context_length, load_tokenizer, local_copy, stop_ids
from qurl_ray.report.report import write_report
from qurl_ray.report.timeline import write_timeline
from qurl_ray.report.viewer import write_rollouts
from qurl_ray.signals import StopRequests
from qurl_ray.tracking.callback import Callback, CallbackSink
from qurl_ray.tracking.sink import Sink
from qurl_ray.tracking.tracker import Tracker
from qurl_ray.training.coordinator.coordinator import Coordinator, packed_handles
from qurl_ray.training.deadlines import CHECKS, MODEL_S, PROBLEMS_S, collection_deadline, stage_deadline
from qurl_ray.training.driver.early import check_early
from qurl_ray.training.driver.prepare import Checked, Prepared, check_problems, check_run, prepare, unequalized
from qurl_ray.training.driver.room import check_disk, start_plan
from qurl_ray.training.driver.run_dir import RunDir, forget_summary, open_run_dir
from qurl_ray.training.driver.summary import summarize, write_summary
from qurl_ray.training.driver.upload import Storage, Uploader
from qurl_ray.training.driver.watch import Fit, Watch
from qurl_ray.training.messages import TaskInputs
from qurl_ray.training.rank.entry import train_entry
from qurl_ray.training.totals import RunTotals
from qurl_ray.types import Event, Outcome

_ROLLOUTS_BYTES = 32 << 20  # limit of samples.jsonl; above it, `qurl report` writes the pages on request
_RAY_S = 300.0
_MARGIN_S = 120.0
_CALLS = 1000  # calls that may wait in the coordinator at a time, in addition to two per rank: they hold no threads


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Folder, policy and summary of a finished run."""

    run_dir: Path
    policy: Path | None
    """None if the run was stopped before its first step."""
    summary: dict[str, Any]
    interrupted: bool


def run(
    config: RunConfig, *, fresh: bool = False, extend: bool = False, callbacks: Iterable[Callback] = ()
) -> RunResult:
    """Train as configured. Attaches to the cluster of $RAY_ADDRESS (submitted jobs have it), else starts Ray here.

    An unfinished run of the same name and settings resumes from its latest checkpoint, unless `fresh`; with `extend`, a
    finished one with fewer `steps` does, too. A first request
    to stop (Ctrl-C, SIGTERM, SIGHUP) ends the run after its step, with a checkpoint and an evaluation; a second one
    aborts it, and so does the first one before the learner has started.

    Args:
        callbacks: called in this process as the run goes on.

    Raises:
        QurlError: the settings are bad (before anything starts), or an error of ours ended the run.
        KeyboardInterrupt: the run was aborted.
    """
    stops = StopRequests()
    with stops.caught():
        with stage_deadline(CHECKS, PROBLEMS_S):
            early = check_early(config)
        with stage_deadline("checking the model", MODEL_S):
            checked = check_run(early)
    return run_until(stops, checked, fresh=fresh, extend=extend, callbacks=callbacks)


def run_until(
    stops: StopRequests,
    checked: Checked,
    *,
    fresh: bool = False,
    extend: bool = False,
    callbacks: Iterable[Callback] = (),
) -> RunResult:
    """Train as `run` does, after its checks. `stops` gets the requests to stop, and knows which there were."""
    with stops.caught():
        config = checked.config
        check_disk(config, checked.model)
        storage = Storage(config) if config.checkpoint.upload else None
        assert config.output_dir, "resolve() comes first"
        restored = storage.restore(config.output_dir / config.name) if storage and not fresh else []
        with open_run_dir(config, fresh=fresh, extend=extend) as place:
            place.notes[:0] = restored
            sinks: list[Sink] = [CallbackSink(callback) for callback in callbacks]
            if storage:
                storage.claim(place.path)
                sinks.append(Uploader(storage, place.path))
            return _run_in(place, config, checked, stops, sinks)


def _run_in(
    place: RunDir, config: RunConfig, checked: Checked, stops: StopRequests, sinks: Sequence[Sink]
) -> RunResult:
    run_dir, resume = place.path, place.resume
    check_problems(checked.task, resume)
    forget_summary(run_dir)
    torch.set_num_threads(os.cpu_count() or 1)
    with Tracker(run_dir, config, resolved=config.model_dump(mode="json"), sinks=sinks) as tracker:
        try:
            totals = rewound(place, tracker)
            _announce(place.notes, "info", tracker)
            prepared = prepare(config, checked, _cold_start_progress(config.model, tracker))
            if invariance := prepared.invariance:  # of this machine: a resumed run may have started on another
                _announce([invariance.sentence()], "info" if invariance.kept else "warning", tracker)
            if not resume:  # else metrics.jsonl has them already
                _announce([*idle_settings(config), *unequalized(config, checked.model)], "warning", tracker)
                task = prepared.task
                _announce(task.notes, "info", tracker)
                counts = {"digest": task.digest(), "train": len(task.train), "held_out": len(task.held_out)}
                message = f"{counts['train']:,} problems to train on, {counts['held_out']:,} held out"
                tracker.handle(Event(kind="info", step=0, message=message, values={"problems": counts}))
            _announce(filter(None, [start_plan(config, local_copy(prepared.spec.source))]), "info", tracker)
            _phase("starting Ray", totals.steps, tracker)
            with _cluster(config, stops) as dashboard:
                if dashboard:
                    _announce([f"Ray's dashboard: http://{dashboard}"], "info", tracker)
                totals = _train(config, prepared, place, totals, tracker, stops)
                summary = summarize(config, totals)
            # A request to stop that came after the last step does not count.
            interrupted = summary["steps"] < config.steps and summary["target_reached_at_step"] is None
            summary |= {
                "interrupted": interrupted,
                "initial_policy": prepared.spec.source,
                "mlflow_run_id": tracker.mlflow_run_id(),
            }
            write_summary(run_dir, summary)
        except BaseException as error:
            _report(run_dir, tracker, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
            raise
        outcome: Outcome = "interrupted" if interrupted else "finished"
        policy = run_dir / "policy" if (run_dir / "policy").is_dir() else None  # none before the first step
        places = {
            "policy": str(policy) if policy else None,
            "report": _report(run_dir, tracker, outcome),
            "mlflow_uri": tracker.mlflow_uri,
            "mlflow_page": tracker.mlflow_page,
            "run_dir": str(run_dir),
        }
        tracker.handle(Event(kind="summary", step=summary["steps"], values=summary | places))
        tracker.close(outcome)
    return RunResult(run_dir=run_dir, policy=policy, summary=summary, interrupted=interrupted)


def rewound(place: RunDir, tracker: Tracker) -> RunTotals:
    """Remove all lines after the checkpoint that the run resumes from, from its files. Return the totals up to it."""
    if not place.resume:
        return RunTotals()
    totals = RunTotals.of(place.resume.state()["totals"])
    tracker.rewind(place.resume.step, totals.evaluations)
    return totals


def _announce(sentences: Iterable[str], kind: Literal["info", "warning"], tracker: Tracker) -> None:
    for sentence in sentences:
        tracker.handle(Event(kind=kind, step=0, message=sentence))


def _phase(message: str, step: int, tracker: Tracker) -> None:
    tracker.handle(Event(kind="phase", step=step, message=message))


def _report(run_dir: Path, tracker: Tracker, outcome: Outcome) -> str | None:
    """Write the timeline, the pages of rollouts and the report, and return the report's path. A failure is only logged:
    a run is not lost because of its report."""
    pages: dict[str, Callable[[Path], Path | None]] = {
        "timeline": write_timeline,
        "pages of rollouts": partial(write_rollouts, limit_bytes=_ROLLOUTS_BYTES),
        "report": partial(write_report, outcome=outcome),  # which links to the others
    }
    page = None
    for name, write in pages.items():
        try:
            page = write(run_dir)
        except Exception as error:
            page = None
            _announce([f"no {name} ({type(error).__name__}: {error}); metrics.jsonl is complete"], "warning", tracker)
    return str(page) if page else None


def _train(
    config: RunConfig, prepared: Prepared, place: RunDir, totals: RunTotals, tracker: Tracker, stops: StopRequests
) -> RunTotals:
    """Start the actors, train, end the actors. Return the totals of the whole run."""
    workers = config.rollout.max_workers or config.rollout.workers
    check_room(demand(config))
    _phase("placing and starting rollout workers", totals.steps, tracker)
    worker_group = WorkerGroup(
        config=config.rollout,
        spec=prepared.spec,
        kernel=config.quantization.kernel,
        keep=prepared.keep,
        threads=config.rollout.threads or max(1, (os.cpu_count() or 1) // workers),
        transport=config.sync.transport,
        colocated=config.placement == "colocated",
    )
    judging, logs = config.task, place.path / "logs"
    with stage_deadline("placing and starting rollout workers", config.rollout.start_limit_s + _MARGIN_S):
        worker_group.start()
        verifiers = start_verifiers(
            judging.verifiers, prepared.task.reward, judging.reward_timeout_s, judging.reward_memory_gb, logs
        )
        environments = start_environments(config.environment, logs)
    coordinator: ActorHandle | None = None
    fit: Fit | None = None
    tokenizer = load_tokenizer(prepared.spec)
    inputs = TaskInputs(
        task=prepared.task,
        tokenizer=tokenizer,
        stop_ids=stop_ids(prepared.spec, tokenizer),
        context=context_length(prepared.spec),
    )
    reference = ray.put(inputs)  # it is held while the run lasts
    try:
        coordinator = (
            ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(Coordinator)
            .options(max_concurrency=_CALLS + 2 * config.learner.workers)
            .remote(config, packed_handles(worker_group.actors, verifiers, environments), place.path, place.resume)
        )
        # Not the handle itself: a process that unpacks it, as Ray Train's controller would, imports the coordinator.
        handle = ray.put(coordinator)
        context = {
            "config": config.model_dump(mode="json"),
            "spec": prepared.spec,
            "coordinator": (handle,),
            "inputs": (reference,),
            "run_dir": str(place.path),
        }
        _phase("placing and starting the learner's ranks", totals.steps, tracker)
        fit = _fit_in_thread(config, context, place.path)
        return Watch(config, coordinator, worker_group, totals, tracker, stops).until_over(fit)
    except DeadlineExceeded:
        _announce([*last_lines("RolloutWorker"), *last_lines("RayTrainWorker")], "warning", tracker)
        raise
    finally:
        try:
            if fit:
                fit.end()
        finally:
            _end(worker_group, verifiers, environments, coordinator)


def _fit_in_thread(config: RunConfig, context: dict[str, Any], run_dir: Path) -> Fit:
    # By default, Ray Train waits forever. The barrier at the end includes rank 0's last evaluation.
    barrier_s = config.learner.timeout_s + collection_deadline(config)
    os.environ["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"] = str(int(barrier_s))
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(int(config.learner.timeout_s))
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")  # with its 2 s, a run ends four seconds later
    on_gpu = config.learner.device == "cuda"
    trainer = TorchTrainer(
        train_entry,
        train_loop_config=context,
        torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo", timeout_s=int(config.learner.timeout_s)),
        scaling_config=scaling_config(config),
        run_config=ray.train.RunConfig(
            name="ray-train",
            storage_path=str(run_dir),
            # Without the second limit, Ray Train tries forever to place ranks for which there is no room.
            failure_config=ray.train.FailureConfig(
                max_failures=config.learner.max_failures, controller_failure_limit=0
            ),
        ),
    )
    fit = Fit(trainer)
    fit.start()
    return fit


def scaling_config(config: RunConfig) -> ray.train.ScalingConfig:
    """Number of ranks, and resources of each, that Ray Train is to place."""
    asked = demand(config)
    return ray.train.ScalingConfig(
        num_workers=asked.ranks, use_gpu="GPU" in asked.rank, resources_per_worker=asked.rank
    )


@contextmanager
def _cluster(config: RunConfig, stops: StopRequests) -> Iterator[str]:
    """Attach to the cluster of $RAY_ADDRESS, else start a Ray for this run only and stop it afterwards. Yield the
    address of the dashboard of a Ray that was started, if it has one."""
    if ray.is_initialized():
        yield ""
        return
    dashboard = ""
    variables = {name: os.environ[name] for name in (*VARIABLES, *MEMORY) if name in os.environ}
    variables["TOKENIZERS_PARALLELISM"] = "false"
    before = dict(os.environ)
    try:
        with stage_deadline("starting Ray", _RAY_S), stops.kept():
            if os.environ.get("RAY_ADDRESS"):
                attach(runtime_env={"env_vars": variables}, log_to_driver=False)
            else:
                # All processes of this Ray inherit these variables. Workers that it starts in advance have no runtime
                # environment, so they could not serve actors that request one. None of its nodes is ever preempted.
                variables["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
                os.environ |= variables
                # Phases alternate, so workers may share cores; Ray counts one core for each worker.
                cpus = max(os.cpu_count() or 1, config.rollout.workers + config.learner.workers)
                dashboard = start(
                    num_cpus=cpus,
                    include_dashboard=config.tracking.ray_dashboard,
                    log_to_driver=False,
                    logging_level="ERROR",  # the console belongs to the run
                )
        yield dashboard
    finally:
        ray.shutdown()
        for name in variables:
            os.environ.pop(name, None)
            os.environ |= {name: before[name]} if name in before else {}


def _end(
    worker_group: WorkerGroup,
    verifiers: VerifierPool,
    environments: Sequence[ActorHandle],
    coordinator: ActorHandle | None,
) -> None:
    if coordinator is not None:
        ray.kill(coordinator)
    worker_group.stop()
    verifiers.close()
    end_environments(environments)


def _cold_start_progress(model: ModelConfig, tracker: Tracker) -> Callable[[int, float], None]:
    started = time.monotonic()
    goal = model.cold_start_accuracy if isinstance(model, TinyModel) else 1.0

    def progress(step: int, accuracy: float) -> None:
        if step % 50 == 0 or accuracy >= goal:
            message = f"cold start: step {step}, accuracy {accuracy:.2f}, {time.monotonic() - started:.0f} s"
            tracker.handle(Event(kind="info", step=0, message=message))

    return progress
