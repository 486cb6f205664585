"""Sink that logs to MLflow. A training run is one MLflow run, with parameters, metrics of every step, sampled rollouts
as traces, and the machine's utilisation; at the end, the report and other files, and the registered policy.

This module imports MLflow, which takes over a second, so it is imported only if MLflow is on. A background thread opens
and migrates the database and logs all records: a first sqlite migration takes another second, a dead server minutes.
Lost records are sent again at the end from the run's files, or later by `replay`. MLflow's global "active run" is not
used, so that of a notebook is not changed.
"""

import json
import logging
import os
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

# These are read when mlflow is imported, or at a request. Telemetry would need a network, which clusters often do not
# have. We do the retries, because those of mlflow take minutes inside one call.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # the console belongs to the run

from mlflow.entities import Dataset, DatasetInput, Experiment, InputTag, Metric, Param, Run, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.rest_store import RestStore
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracing.client import TracingClient
from mlflow.tracking import MlflowClient
from mlflow.utils.validation import (
    MAX_DATASET_DIGEST_SIZE,
    MAX_DATASET_NAME_SIZE,
    MAX_DATASET_SOURCE_SIZE,
    MAX_METRICS_PER_BATCH,
    MAX_PARAMS_TAGS_PER_BATCH,
    MAX_TAG_VAL_LENGTH,
)
from sqlalchemy.exc import OperationalError

from qurl_ray.config import RunConfig
from qurl_ray.config.paths import expanded
from qurl_ray.config.shown import reason, redacted, shown, shown_address
from qurl_ray.config.tracking import mlflow_address
from qurl_ray.report.text import one_line
from qurl_ray.runs.files import read_config
from qurl_ray.runs.recorded import events, message_lines, samples
from qurl_ray.runs.values import flatten, plain
from qurl_ray.tracking import mlflow_policy
from qurl_ray.tracking.background import Background
from qurl_ray.tracking.mlflow_records import (
    event_metrics,
    metric_name,
    param_text,
    trace_id,
    trace_info,
    trace_spans,
)
from qurl_ray.types import Event, Outcome

_STATUS = {"finished": RunStatus.FINISHED, "failed": RunStatus.FAILED, "interrupted": RunStatus.KILLED}
_ARTIFACTS = ("summary.json", "samples.jsonl", "metrics.jsonl", "report.html")
RUN_ID_FILE = "mlflow_run_id"
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Tags of an experiment of training runs. As there are traces, too, MLflow would take it for one of prompts."""
_UI = "http://127.0.0.1:5000"  # where `mlflow ui` listens by default
_DRAIN_S = 30.0
_GIT_S = 5.0
_NUMBERS = ("step", "evaluation", "warning", "info", "summary")
"""Kinds of events whose numbers are logged as metrics."""
_WAITING_SAMPLES = 50
"""Limit of waiting operations for queueing a step's samples: with long answers, these take megabytes each."""
_TRACES_PER_PAGE = 500
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500
_Item = TypeVar("_Item")

for _chatty in ("mlflow", "alembic"):
    logging.getLogger(_chatty).setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Name, place, parameters and tags of the MLflow run."""

    uri: str
    """Address of a tracking server (http…) or a database (sqlite:///…)."""
    experiment: str
    name: str
    artifact_root: Path | None
    """Folder for artifacts if this run creates the experiment; None if the server chooses it."""
    params: dict[str, str]
    tags: dict[str, str]
    problems: tuple[str, str]
    """Name and settings of the run's problems."""
    id_file: str = RUN_ID_FILE
    """File of the run's folder that holds the id of the MLflow run."""


def plan_run(run_dir: Path, config: RunConfig, resolved: Mapping[str, Any]) -> RunPlan:
    """Derive names, parameters and tags from a config. `resolved` is the config as plain nested values.

    Raises:
        ConfigError: see mlflow_address.
    """
    folder = expanded(config.output_dir or run_dir.parent).resolve()
    uri = mlflow_address(config.tracking.mlflow_uri, folder)
    settings = shown(resolved)
    task = settings.get("task", {})
    task_name = task.get("path") or task.get("dataset") or task.get("problems") or task.get("type", "")
    return RunPlan(
        uri=uri,
        experiment=config.tracking.experiment,
        name=config.name,
        artifact_root=None if uri.startswith(("http", "databricks")) else folder / "mlartifacts",
        params={metric_name(key): param_text(value) for key, value in flatten(settings, ".")},
        problems=(str(task_name)[-MAX_DATASET_NAME_SIZE:], json.dumps(plain(task))[:MAX_DATASET_SOURCE_SIZE]),
        tags={
            "quantization": config.rollout.quantization,
            "correction": config.algorithm.correction.type,
            "algorithm": config.algorithm.type,
            **_source(),
            "mlflow.note.content": (
                f"{config.algorithm.type}, {config.rollout.quantization} rollouts, correction "
                f"{config.algorithm.correction.type}; folder {run_dir}"
            ),
        },
    )


def _source() -> dict[str, str]:
    """Return MLflow's tags of the command that runs, and of the commit of the folder that it runs in."""
    command = redacted(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))
    kind = "JOB" if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ else "LOCAL"
    tags = {"mlflow.source.name": one_line(command, MAX_TAG_VAL_LENGTH), "mlflow.source.type": kind}
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or no repository
        return tags
    return tags | {"mlflow.source.git.commit": done.stdout.strip()}


class MlflowSink:
    """Sink that queues its records for MLflow; see Background for its behaviour if MLflow fails."""

    name = "MLflow"

    def __init__(
        self,
        plan: RunPlan,
        *,
        run_dir: Path,
        resolved: Mapping[str, Any],
        drain_s: float = _DRAIN_S,
        watch: bool = True,
    ) -> None:
        """Start to open the MLflow run: that of the folder if an interrupted run is resumed, else a new one.

        Args:
            run_dir: folder in which summary.json, policy/ and other artifacts are looked for at the end. Its file
                mlflow_run_id holds the id of the MLflow run.
            resolved: config that is logged, without its secrets, as the artifact config.json.
            drain_s: deadline of close(), in seconds.
            watch: True to record the utilisation of this machine.
        """
        self.uri = plan.uri
        self._plan = plan
        self._run_dir = run_dir
        self._resolved = resolved
        self._drain_s = drain_s
        self._open_run: _OpenRun | None = None
        self._settled = threading.Event()
        self._warnings = 0
        self._began = next((at for _, at in events(run_dir)), None)
        self._ended: float | None = None
        self._known: set[tuple[str, int]] | None = None
        self._notices: deque[str] = deque()
        recourse = f"{run_dir} has all of them: qurl track {shlex.quote(str(run_dir))} sends them"
        self._background = Background(self.name, first=self._open, is_transient=is_transient, recourse=recourse)
        self._background.submit(self._log_plan)
        self._monitor: SystemMetricsMonitor | None = None
        if watch:
            self._background.submit(self._watch_machine)

    def run_id(self, timeout_s: float) -> str | None:
        """Id of the MLflow run; None if it cannot be opened within `timeout_s` seconds."""
        self._settled.wait(timeout_s)
        return self._open_run.run_id if self._open_run else None

    def page(self) -> str | None:
        """Address of MLflow's page of the experiment's runs, on its server or that of `mlflow ui` on this machine; None
        if the run is not open, or MLflow has no such page there."""
        if not self._open_run or not self.uri.startswith(("http", "sqlite")):
            return None
        server = shown_address(self.uri).rstrip("/") if self.uri.startswith("http") else _UI
        return f"{server}/#/experiments/{self._open_run.experiment_id}/runs?compareRunsMode=CHART"

    def handle(self, event: Event, at: float) -> None:
        self._ended = at
        if event.kind == "samples":
            records = [(event.step, at, sample) for sample in event.values.get("samples", [])]
            self._background.offer(lambda: self._run().trace(records), _WAITING_SAMPLES)
        elif event.kind in _NUMBERS:
            self._background.offer(lambda: self._log(event, at))

    def notices(self) -> list[str]:
        own = [self._notices.popleft() for _ in range(len(self._notices))]
        return own + self._background.notices()

    def close(self, outcome: Outcome) -> None:
        self._background.submit(self._stop_monitor)
        self._background.submit(self._make_good)
        self._background.submit(self._log_artifacts)
        self._background.submit(lambda: self._end(outcome))
        if outcome != "failed":
            self._background.submit(self._register_policy)  # last, because only copying a policy may take long
        self._background.drain(self._drain_s)

    # --- in the background thread ------------------------------------------------------------------

    def _open(self) -> None:
        try:
            client = MlflowClient(self.uri, registry_uri=self.uri)
            earlier = self._earlier_run(client)
            run = earlier or client.create_run(
                _experiment_id(client, self._plan),
                run_name=self._plan.name,
                start_time=int(1000 * (self._began or time.time())),
            )
            (self._run_dir / self._plan.id_file).write_text(run.info.run_id)
            self._open_run = _OpenRun(
                client=client, run_id=run.info.run_id, experiment_id=run.info.experiment_id, earlier=earlier
            )
        finally:  # also after a failure, so that no caller waits for an id that may never come
            self._settled.set()

    def _earlier_run(self, client: MlflowClient) -> Run | None:
        """Reopen the MLflow run whose id is in the folder. Return None if there is none."""
        file = self._run_dir / self._plan.id_file
        if not file.is_file():
            return None
        run_id = file.read_text(errors="replace").strip()
        try:
            client.update_run(run_id, status="RUNNING")  # refused if it was deleted
            run = client.get_run(run_id)
        except MlflowException as error:
            if is_transient(error):
                raise
            store = shown_address(self.uri)
            self._notices.append(
                f"MLflow run {run_id}, which this run resumes, is not in {store}: a new one was created"
            )
            return None
        self._warnings = int(run.data.tags.get("warnings", 0))
        return run

    def _run(self) -> "_OpenRun":
        assert self._open_run is not None, "Background runs nothing after an open that failed"
        return self._open_run

    def _log_plan(self) -> None:
        run = self._run()
        logged = run.earlier.data.params if run.earlier else {}  # a parameter cannot be logged twice
        params = [Param(key, value) for key, value in self._plan.params.items() if key not in logged]
        for batch in _batches(params, MAX_PARAMS_TAGS_PER_BATCH):
            run.client.log_batch(run.run_id, params=batch)
        run.tag(self._plan.tags)

    def _watch_machine(self) -> None:
        """Start MLflow's own monitor of this machine. It stops at the first request that its server does not answer."""
        run = self._run()
        self._monitor = SystemMetricsMonitor(
            run.run_id, resume_logging=run.earlier is not None, tracking_uri=run.client.tracking_uri
        )
        self._monitor.start()

    def _stop_monitor(self) -> None:
        if self._monitor:
            self._monitor.finish()

    def _log_problems(self, event: Event) -> None:
        """Log the problems of the run as its data set, if the event describes them."""
        if problems := event.values.get("problems"):
            name, source = self._plan.problems
            dataset = Dataset(
                name=name,
                digest=str(problems["digest"])[:MAX_DATASET_DIGEST_SIZE],
                source_type="qurl-ray task",
                source=source,
                profile=json.dumps(plain(problems)),
            )
            context = InputTag("mlflow.data.context", "train")
            self._run().client.log_inputs(self._run().run_id, [DatasetInput(dataset, [context])])

    def _log(self, event: Event, at: float) -> None:
        run = self._run()
        if event.kind == "warning":
            self._warnings += 1
            run.tag({"warnings": str(self._warnings), "last_warning": one_line(event.message, MAX_TAG_VAL_LENGTH)})
        self._log_problems(event)
        metrics = event_metrics(event, at)
        if run.earlier and (event.kind == "step" or (event.kind == "evaluation" and event.message == "during")):
            # The run may have logged this step before it was resumed from a checkpoint.
            if self._known is None:
                self._known = run.logged()
            metrics = [metric for metric in metrics if (metric.key, metric.step) not in self._known]
        run.log(metrics)

    def _make_good(self) -> None:
        """Send records of the files that the MLflow run lacks, after an outage or from before an interruption."""
        if self._began is None and not self._background.lost:
            return
        run = self._run()
        there, recorded = run.logged(), list(events(self._run_dir))
        self._ended = max((at for _, at in recorded), default=self._ended)
        metrics = [m for event, at in recorded if event.kind in _NUMBERS for m in event_metrics(event, at)]
        run.log([metric for metric in metrics if (metric.key, metric.step) not in there])
        for event, _ in recorded:
            self._log_problems(event)  # a second time does no harm
        traced = run.traced()
        missing = (
            (step, at, sample)
            for step, at, sample in samples(self._run_dir)
            if trace_id(run.run_id, step, sample) not in traced
        )
        for batch in _batches(missing, _WAITING_SAMPLES):
            run.trace(batch)
        if warnings := [event.message for event, _ in recorded if event.kind == "warning"]:
            run.tag({"warnings": str(len(warnings)), "last_warning": one_line(warnings[-1], MAX_TAG_VAL_LENGTH)})
        self._background.made_good()

    def _log_artifacts(self) -> None:
        run = self._run()
        for name in _ARTIFACTS:
            if (self._run_dir / name).is_file():
                run.client.log_artifact(run.run_id, str(self._run_dir / name))
        settings = {"config.yaml": read_config(self._run_dir), "config.json": plain(shown(self._resolved))}
        for name, values in settings.items():
            if values:
                run.client.log_dict(run.run_id, values, name)
        if messages := "".join(message_lines(self._run_dir)):
            run.client.log_text(run.run_id, messages, "events.jsonl")

    def _end(self, outcome: Outcome) -> None:
        run = self._run()
        ended = None if self._ended is None else int(1000 * self._ended)
        run.client.set_terminated(run.run_id, RunStatus.to_string(_STATUS[outcome]), ended)

    def _register_policy(self) -> None:
        folder = self._run_dir / mlflow_policy.FOLDER
        if not folder.is_dir():
            return
        run, plan = self._run(), self._plan
        try:
            mlflow_policy.register_policy(run.client, run.run_id, self._run_dir, f"{plan.experiment}-{plan.name}")
        except Exception as error:
            if is_transient(error):
                raise
            self._notices.append(f"MLflow did not register the policy ({reason(error)}); it is in {folder}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenRun:
    client: MlflowClient
    run_id: str
    experiment_id: str
    earlier: Run | None
    """State of the MLflow run when it was resumed; None if it is new."""

    def tag(self, tags: Mapping[str, str]) -> None:
        self.client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def log(self, metrics: Iterable[Metric]) -> None:
        for batch in _batches(metrics, MAX_METRICS_PER_BATCH):
            self.client.log_batch(self.run_id, metrics=batch)

    def logged(self) -> set[tuple[str, int]]:
        """Return (name, step) of all metrics that the run has."""
        names = self.client.get_run(self.run_id).data.metrics
        return {(m.key, m.step) for name in names for m in self.client.get_metric_history(self.run_id, name)}

    def trace(self, records: Sequence[tuple[int, float, dict[str, Any]]]) -> None:
        """Write one trace per (step, unix time, sample). An existing trace is overwritten."""
        tracing = TracingClient(self.client.tracking_uri)
        for step, at, sample in records:
            tracing.start_trace(trace_info(self.run_id, self.experiment_id, step, sample, at))
        try:
            tracing.log_spans(
                self.experiment_id,
                [span for step, at, sample in records for span in trace_spans(self.run_id, step, sample, at)],
            )
        except NotImplementedError as error:
            if "could not identify" not in str(error):
                raise
            RestStore._get_server_version.cache_clear()  # else it would remember that the server was unavailable
            raise ConnectionError(str(error)) from None

    def traced(self) -> set[str]:
        """Return the ids of the run's traces."""
        ids: set[str] = set()
        token: str | None = None
        while True:
            page = self.client.search_traces(
                locations=[self.experiment_id],
                run_id=self.run_id,
                max_results=_TRACES_PER_PAGE,
                page_token=token,
                include_spans=False,
            )
            ids |= {trace.info.trace_id for trace in page}
            token = page.token
            if not token:
                return ids


def is_transient(error: Exception) -> bool:
    """True if a retry may help: server unavailable or busy, or database locked. A refused value is not transient."""
    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= _SERVER_ERROR or status == _TOO_MANY_REQUESTS
    return isinstance(error, ConnectionError | TimeoutError | OperationalError)


def _experiment_id(client: MlflowClient, plan: RunPlan) -> str:
    experiment: Experiment | None = client.get_experiment_by_name(plan.experiment)
    if experiment:
        return experiment.experiment_id
    location = plan.artifact_root.as_uri() if plan.artifact_root else None
    try:
        return client.create_experiment(plan.experiment, artifact_location=location, tags=_EXPERIMENT_TAGS)
    except MlflowException:
        # Another run that started at the same time may have created it.
        experiment = client.get_experiment_by_name(plan.experiment)
        if not experiment:
            raise
        return experiment.experiment_id


def _batches(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
