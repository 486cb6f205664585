"""Runs of an MLflow experiment, for a comparison. They are read from their artifacts; a run without artifacts is read
from its metrics and parameters."""

import difflib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Run as MlflowRun
from mlflow.tracking import MlflowClient

from qurl_ray.config.shown import shown, shown_address
from qurl_ray.errors import ConfigError
from qurl_ray.report.compare import MOST, Run, named
from qurl_ray.runs.files import Evaluation, RunRecord, finite, read_run
from qurl_ray.tracking.mlflow_client import mlflow_at

_FILES = ("metrics.jsonl", "config.yaml", "summary.json")


def experiment_runs(uri: str, experiment: str) -> list[Run]:
    """Return the experiment's latest runs with a recorded step, the oldest of them first.

    Raises:
        ConfigError: there is no such experiment (the message names the most similar one), or MLflow cannot be reached.
    """
    with mlflow_at(uri, "read from") as client:
        found = client.get_experiment_by_name(experiment)
        if not found:
            raise ConfigError(_no_experiment(client, uri, experiment))
        runs = client.search_runs([found.experiment_id], max_results=MOST, order_by=["attributes.start_time DESC"])
        read = ((run.info.run_name, f"{run.info.run_name} {run.info.run_id[:8]}", _record(client, run)) for run in runs)
        return named([(name, long, record) for name, long, record in read if record.rows][::-1])


def _no_experiment(client: MlflowClient, uri: str, experiment: str) -> str:
    known = [entry.name for entry in client.search_experiments()]
    nearest = difflib.get_close_matches(experiment, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are: {', '.join(sorted(known))}"
    return f"no experiment {experiment!r} in {shown_address(uri)}; {hint}"


def _record(client: MlflowClient, run: MlflowRun) -> RunRecord:
    kept = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    if "metrics.jsonl" not in kept:
        return _from_metrics(client, run)
    with tempfile.TemporaryDirectory() as folder:
        for name in kept & set(_FILES):
            client.download_artifacts(run.info.run_id, name, folder)
        return read_run(Path(folder))


def _from_metrics(client: MlflowClient, run: MlflowRun) -> RunRecord:
    """Build the record of a run without artifacts from its logged metrics and parameters."""
    rows: dict[int, dict[str, float | None]] = {}
    evaluations: dict[tuple[str, int], dict[str, float | None]] = {}
    for name in run.data.metrics:
        part, _, key = name.partition("/")
        for metric in client.get_metric_history(run.info.run_id, name):
            if part in ("eval", "eval_rollout"):
                evaluations.setdefault((part, metric.step), {})[key] = finite(metric.value)
            elif part not in ("summary", "system", "problems"):
                rows.setdefault(metric.step, {})[name] = finite(metric.value)
    return RunRecord(
        config={key: shown(_plain(value), key) for key, value in run.data.params.items()},
        summary=_summary(run.info.status, max(rows, default=0)),
        rows=sorted(rows.items()),
        evaluations=[_evaluation(*place, values) for place, values in sorted(evaluations.items())],
    )


def _summary(status: str, steps: int) -> dict[str, Any] | None:
    """Return what MLflow's status of a run says of its summary; None if it has not ended or has failed."""
    return {"steps": steps, "interrupted": status == "KILLED"} if status in ("FINISHED", "KILLED") else None


def _evaluation(part: str, step: int, values: Mapping[str, float | None]) -> Evaluation:
    label = "during" if part == "eval_rollout" else "after" if step else "before"
    return Evaluation(
        step=step,
        label=label,
        accuracy=values.get("accuracy") or 0.0,
        low=values.get("low"),
        high=values.get("high"),
        problems=values.get("problems"),
        reward=values.get("reward"),
        reward_low=values.get("reward_low"),
        reward_high=values.get("reward_high"),
    )


def _plain(text: str) -> Any:
    """Convert a parameter from text to its original value."""
    try:
        return json.loads(text)
    except ValueError:
        return text
