"""One MLflow run per training run: parameters, metrics of every step; at the end artifacts and the registered policy.

Importing this module imports MLflow (over a second), so only a run that wants it does. The database is opened and
migrated, and everything is logged, in a background thread: a first sqlite migration takes another second, a dead
server minutes. MLflow's own global "active run" is not used; a notebook's stays as it was.
"""

import json
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

# Read when mlflow is imported, or at a request. Telemetry would look for a network that clusters often do not have;
# retries are ours, because mlflow's take minutes inside one call.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

from mlflow.entities import Experiment, Metric, Param, Run, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.tracking import MlflowClient
from mlflow.utils.validation import (
    MAX_ENTITY_KEY_LENGTH,
    MAX_METRICS_PER_BATCH,
    MAX_PARAM_VAL_LENGTH,
    MAX_PARAMS_TAGS_PER_BATCH,
    MAX_TAG_VAL_LENGTH,
)
from sqlalchemy.exc import OperationalError

from qurl_ray.config import RunConfig
from qurl_ray.tracking.background import Background
from qurl_ray.tracking.sink import Outcome
from qurl_ray.tracking.text import one_line, storable
from qurl_ray.tracking.values import flatten, number, plain
from qurl_ray.types import Event

_STATUS = {"finished": RunStatus.FINISHED, "failed": RunStatus.FAILED, "interrupted": RunStatus.KILLED}
_ARTIFACTS = ("config.yaml", "config.json", "summary.json", "samples.jsonl", "metrics.jsonl", "report.html")
_POLICY = "policy"  # the folder, and the artifact that it becomes
_POLICY_TAGS = (
    "accuracy_before",
    "accuracy_after",
    "accuracy_after_quantized",
    "steps",
    "precision_flow",
    "quantization",
    "correction",
    "uaq_scale",
)
_COPY_LIMIT_BYTES = 2_000_000_000
"""Policies up to this size are copied to the artifacts; of larger ones the registry only knows the folder."""
_MAX_MODEL_NAME = 250  # the registry's column holds 256
_RUN_ID_FILE = "mlflow_run_id"
_DRAIN_S = 30.0
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500

for _chatty in ("mlflow", "alembic"):
    logging.getLogger(_chatty).setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What the MLflow run is called and starts with."""

    uri: str
    """Tracking server (http…) or database (sqlite:///…)."""
    experiment: str
    name: str
    artifact_root: Path | None
    """Folder for artifacts if this run creates the experiment; None leaves it to the server."""
    params: dict[str, str]
    tags: dict[str, str]


def plan_run(run_dir: Path, config: RunConfig, resolved: Mapping[str, Any]) -> RunPlan:
    """Names, parameters and tags from a config; `resolved` is the config as plain nested values."""
    folder = (config.output_dir or run_dir.parent).expanduser().resolve()
    uri = config.tracking.mlflow_uri or f"sqlite:///{folder / 'mlflow.db'}"
    return RunPlan(
        uri=uri,
        experiment=config.tracking.experiment,
        name=config.name,
        artifact_root=None if uri.startswith(("http", "databricks")) else folder / "mlartifacts",
        params={metric_name(key): _param_text(value) for key, value in flatten(resolved, ".")},
        tags={
            "quantization": config.rollout.quantization,
            "correction": config.algorithm.correction.type,
            "algorithm": config.algorithm.type,
        },
    )


def metric_name(key: str) -> str:
    """The nearest name that MLflow accepts: letters, digits and _ . - space, in a path without empty or dot parts."""
    parts = re.sub(r"[^\w.\- /]", "_", key).split("/")
    path = "/".join(part for part in parts if part not in ("", ".", ".."))
    path = re.sub(r"^\.+", "_", path)  # MLflow takes any name that starts with two dots for a parent folder
    return path[:MAX_ENTITY_KEY_LENGTH].rstrip("/") or "_"


class MlflowSink:
    """Queues what it is given; see Background for what happens when MLflow fails."""

    name = "MLflow"

    def __init__(self, plan: RunPlan, *, run_dir: Path, resolved: Mapping[str, Any], drain_s: float = _DRAIN_S) -> None:
        """Start to open the run: that of the folder, if a run that was interrupted is gone on with, else a new one.

        Args:
            run_dir: where summary.json, policy/ and their like are looked for at the end. The file mlflow_run_id in it
                holds the id of the MLflow run.
            resolved: kept as the artifact config.json, unless the folder holds one.
            drain_s: deadline of close(), in seconds.
        """
        self.uri = plan.uri
        self._plan = plan
        self._run_dir = run_dir
        self._resolved = resolved
        self._drain_s = drain_s
        self._open_run: _OpenRun | None = None
        self._settled = threading.Event()
        self._messages: list[str] = []
        self._warnings = 0
        self._last_step: int | None = None
        self._notices: deque[str] = deque()
        self._background = Background(self.name, first=self._open, is_transient=is_transient)
        self._background.submit(self._log_plan)

    def run_id(self, timeout_s: float) -> str | None:
        """Id of the MLflow run; None if it cannot be opened, or not within `timeout_s` seconds."""
        self._settled.wait(timeout_s)
        return self._open_run.run_id if self._open_run else None

    def handle(self, event: Event, at: float) -> None:
        self._background.offer(lambda: self._log(event, at))

    def notices(self) -> list[str]:
        own = [self._notices.popleft() for _ in range(len(self._notices))]
        return own + self._background.notices()

    def close(self, outcome: Outcome) -> None:
        self._background.submit(self._log_artifacts)
        self._background.submit(lambda: self._end(outcome))
        if outcome != "failed":
            self._background.submit(self._register_policy)  # last: of all this, only copying a policy may take long
        self._background.drain(self._drain_s)

    # --- in the background thread ------------------------------------------------------------------

    def _open(self) -> None:
        try:
            client = MlflowClient(self.uri, registry_uri=self.uri)
            earlier = self._earlier_run(client)
            run = earlier or client.create_run(_experiment_id(client, self._plan), run_name=self._plan.name)
            (self._run_dir / _RUN_ID_FILE).write_text(run.info.run_id)
            self._open_run = _OpenRun(client=client, run_id=run.info.run_id, earlier=earlier)
        finally:  # also after a failure, so that nobody waits for an id that may never come
            self._settled.set()

    def _earlier_run(self, client: MlflowClient) -> Run | None:
        """The run whose id the folder holds, running again; None if there is none."""
        file = self._run_dir / _RUN_ID_FILE
        if not file.is_file():
            return None
        run_id = file.read_text().strip()
        try:
            client.update_run(run_id, status="RUNNING")  # refused if it was deleted
            run = client.get_run(run_id)
        except MlflowException as error:
            if is_transient(error):
                raise
            self._notices.append(f"MLflow run {run_id}, which this one goes on with, is not in {self.uri}: made anew")
            return None
        self._warnings = int(run.data.tags.get("warnings", 0))
        return run

    def _run(self) -> "_OpenRun":
        assert self._open_run is not None, "Background runs nothing after an open that failed"
        return self._open_run

    def _log_plan(self) -> None:
        run = self._run()
        logged = run.earlier.data.params if run.earlier else {}  # a parameter cannot be logged twice
        params = iter([Param(key, value) for key, value in self._plan.params.items() if key not in logged])
        while batch := list(islice(params, MAX_PARAMS_TAGS_PER_BATCH)):
            run.client.log_batch(run.run_id, params=batch)
        run.tag(self._plan.tags)

    def _log(self, event: Event, at: float) -> None:
        if event.kind in ("samples", "prompts"):
            return  # they are in samples.jsonl, an artifact of the run
        run = self._run()
        if event.kind in ("warning", "info"):
            self._log_message(run, event, at)
        prefix = "summary/" if event.kind == "summary" else ""
        metrics = to_metrics(event.values, step=event.step, at=at, prefix=prefix)
        repeatable = event.kind == "step" or (event.kind == "evaluation" and event.message == "during")
        if repeatable and self._is_logged(run, metrics):
            return
        rest = iter(metrics)
        while batch := list(islice(rest, MAX_METRICS_PER_BATCH)):
            run.client.log_batch(run.run_id, metrics=batch)

    def _is_logged(self, run: "_OpenRun", metrics: list[Metric]) -> bool:
        """Whether the run had this step before it was gone on with from a checkpoint. The server is asked once."""
        if not run.earlier or not metrics:
            return False
        if self._last_step is None:
            history = run.client.get_metric_history(run.run_id, metrics[0].key)
            self._last_step = max((metric.step for metric in history), default=-1)
        return metrics[0].step <= self._last_step

    def _log_message(self, run: "_OpenRun", event: Event, at: float) -> None:
        record = {"time": at, "kind": event.kind, "step": event.step, "message": event.message, "values": event.values}
        self._messages.append(json.dumps(plain(record)) + "\n")
        if event.kind == "warning":
            self._warnings += 1
            run.tag({"warnings": str(self._warnings), "last_warning": one_line(event.message, MAX_TAG_VAL_LENGTH)})

    def _log_artifacts(self) -> None:
        run = self._run()
        for name in _ARTIFACTS:
            if (self._run_dir / name).is_file():
                run.client.log_artifact(run.run_id, str(self._run_dir / name))
        if not (self._run_dir / "config.json").is_file():
            run.client.log_dict(run.run_id, plain(self._resolved), "config.json")
        if self._messages:
            run.client.log_text(run.run_id, "".join(self._messages), "events.jsonl")

    def _end(self, outcome: Outcome) -> None:
        run = self._run()
        run.client.set_terminated(run.run_id, RunStatus.to_string(_STATUS[outcome]))

    def _register_policy(self) -> None:
        folder = self._run_dir / _POLICY
        if not folder.is_dir():
            return
        try:
            _register(self._run(), folder, self._plan, _policy_tags(self._run_dir))
        except Exception as error:
            if is_transient(error):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._notices.append(f"MLflow did not register the policy ({reason}); it is in {folder}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenRun:
    client: MlflowClient
    run_id: str
    earlier: Run | None
    """The run as it was when it was gone on with; None if it is new."""

    def tag(self, tags: Mapping[str, str]) -> None:
        self.client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def to_metrics(values: Mapping[str, Any], *, step: int, at: float, prefix: str = "") -> list[Metric]:
    """The numbers among `values` under names that MLflow accepts; NaN stays NaN. `at` is unix time in seconds."""
    leaves = ((key, number(value)) for key, value in flatten(values, "/"))
    return [
        Metric(metric_name(prefix + key), value, int(at * 1000), step) for key, value in leaves if value is not None
    ]


def is_transient(error: Exception) -> bool:
    """Worth another try: the server is away or busy, the database is locked. A refused value is not."""
    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status >= _SERVER_ERROR or status == _TOO_MANY_REQUESTS
    return isinstance(error, ConnectionError | TimeoutError | OperationalError)


def _experiment_id(client: MlflowClient, plan: RunPlan) -> str:
    found: Experiment | None = client.get_experiment_by_name(plan.experiment)
    if found:
        return found.experiment_id
    location = plan.artifact_root.as_uri() if plan.artifact_root else None
    try:
        return client.create_experiment(plan.experiment, artifact_location=location)
    except MlflowException:
        # Another run that started at the same moment may have made it.
        found = client.get_experiment_by_name(plan.experiment)
        if not found:
            raise
        return found.experiment_id


def _register(run: _OpenRun, folder: Path, plan: RunPlan, tags: Mapping[str, str]) -> None:
    """A version of the model <experiment>-<run name>, from the run's artifact policy/ or, if large, the folder.

    A run has one version: going on with it replaces the artifact, and so what its version is.
    """
    client, name = run.client, model_name(f"{plan.experiment}-{plan.name}")
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    if sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= _COPY_LIMIT_BYTES:
        client.log_artifacts(run.run_id, str(folder), _POLICY)
        for file in folder.iterdir():
            if file.suffix != ".safetensors":  # mlflow.transformers looks for the tokenizer here
                client.log_artifact(run.run_id, str(file), f"{_POLICY}/components/tokenizer")
        client.log_text(run.run_id, _mlmodel(folder, run.run_id), f"{_POLICY}/MLmodel")
        source = f"{client.get_run(run.run_id).info.artifact_uri}/{_POLICY}"
    else:
        source = folder.resolve().as_uri()
    for known in client.search_model_versions(f"run_id='{run.run_id}'"):
        if (known.name, known.source) == (name, source):
            for key, value in tags.items():
                client.set_model_version_tag(name, known.version, key, value)
            return
    client.create_model_version(name, source, run_id=run.run_id, tags=dict(tags))


def model_name(text: str) -> str:
    """The nearest name that MLflow's registry accepts: letters, digits and _ . - space."""
    return re.sub(r"[^\w.\- ]", "_", text)[:_MAX_MODEL_NAME]


def _mlmodel(folder: Path, run_id: str) -> str:
    """The file that lets mlflow.transformers load the checkpoint beside it, written out: its own writer loads torch
    and the weights."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = Model(artifact_path=_POLICY, run_id=run_id)
    model.add_flavor(
        "transformers",
        task="text-generation",
        instance_type="TextGenerationPipeline",
        pipeline_model_type=architecture,
        source_model_name=_POLICY,
        model_binary=".",
        components=["tokenizer"],
        tokenizer_type="AutoTokenizer",
        transformers_version=version("transformers"),
        code=None,
    )
    return model.to_yaml()


def _policy_tags(run_dir: Path) -> dict[str, str]:
    """What summary.json, if there is one, says of the policy."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except FileNotFoundError:
        return {}
    return {key: storable(str(summary[key])) for key in _POLICY_TAGS if summary.get(key) is not None}


def _param_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(plain(value))
    return storable(text)[:MAX_PARAM_VAL_LENGTH]
