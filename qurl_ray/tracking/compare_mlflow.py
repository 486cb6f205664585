"""Runs of an MLflow experiment, for a comparison. They are read from the files that a run logs at its end."""

import tempfile
from pathlib import Path

from mlflow.entities import Run as MlflowRun
from mlflow.tracking import MlflowClient

from qurl_ray.config.shown import shown_address
from qurl_ray.errors import ConfigError
from qurl_ray.extensions import did_you_mean
from qurl_ray.report.compare import MOST, Run, named
from qurl_ray.runs.files import RunRecord, read_run
from qurl_ray.tracking.mlflow_client import mlflow_at

_FILES = ("metrics.jsonl", "config.yaml", "summary.json")


def experiment_runs(uri: str, experiment: str) -> list[Run]:
    """Return the experiment's latest runs that have ended after a step, the oldest of them first.

    Raises:
        ConfigError: there is no such experiment (the message names the most similar one), or MLflow cannot be reached.
    """
    with mlflow_at(uri, "read from") as client:
        entry = client.get_experiment_by_name(experiment)
        if not entry:
            known = [other.name for other in client.search_experiments()]
            hint = did_you_mean(experiment, known, cutoff=0.5) or f"; there are: {', '.join(sorted(known))}"
            raise ConfigError(f"no experiment {experiment!r} in {shown_address(uri)}{hint}")
        runs = client.search_runs([entry.experiment_id], max_results=MOST, order_by=["attributes.start_time DESC"])
        read = ((run.info.run_name, f"{run.info.run_name} {run.info.run_id[:8]}", _record(client, run)) for run in runs)
        return named([(name, long, record) for name, long, record in read if record.rows][::-1])


def _record(client: MlflowClient, run: MlflowRun) -> RunRecord:
    """Read the files that the run has logged. Without them, the record is empty."""
    logged = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    with tempfile.TemporaryDirectory() as folder:
        for name in logged & set(_FILES):
            client.download_artifacts(run.info.run_id, name, folder)
        return read_run(Path(folder))
