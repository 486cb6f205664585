"""Transfer of a run's folder to MLflow after the run, for records that a server missed while it was down."""

import fcntl
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from qurl_ray.config import RunConfig
from qurl_ray.config.load import read_settings, validated_run
from qurl_ray.config.shown import shown_address
from qurl_ray.errors import ConfigError
from qurl_ray.runs.files import read_run

_OPEN_S = 60.0
_SEND_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Result of a replay: the MLflow run, and what failed."""

    uri: str
    run_id: str
    notices: list[str]
    """Failures, one sentence each."""


def replay(run_dir: Path, uri: str | None = None) -> Replayed:
    """Send the records in the folder of an ended run that its MLflow run lacks. A second call changes nothing.

    The MLflow run is that of the file mlflow_run_id (of another one for another address), or a new one if there is no
    such file or MLflow does not know the run.

    Args:
        uri: address of a server or database, to be used instead of that of the run's config.

    Raises:
        ConfigError: the folder holds no run, the run has not ended, or MLflow cannot be reached.
    """
    from qurl_ray.tracking.mlflow_sink import MlflowSink, plan_run  # takes over a second

    run_dir = run_dir.resolve()
    if not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(f"{run_dir} holds no metrics.jsonl; give the folder of a run, such as runs/quickstart")
    if _going_on(run_dir):
        raise ConfigError(f"the run in {run_dir} is still going on, and sends its records itself")
    config = _config(run_dir, uri)
    resolved = config.model_dump(mode="json")
    plan = plan_run(run_dir, config, resolved)
    own = _config(run_dir, None).tracking.mlflow_uri or f"sqlite:///{run_dir.parent / 'mlflow.db'}"
    if shown_address(plan.uri) != shown_address(own):
        # The run's own MLflow has another run: a run that resumes, and a second call, find theirs.
        plan = replace(plan, id_file=f"{plan.id_file}-{hashlib.sha256(plan.uri.encode()).hexdigest()[:8]}")
    sink = MlflowSink(plan, run_dir=run_dir, resolved=resolved, drain_s=_SEND_S, watch=False)
    run_id = sink.run_id(_OPEN_S)
    if run_id is None:
        notices = sink.notices()
        sink.close("failed")  # else it would continue to retry
        raise ConfigError(" ".join(notices) or f"{shown_address(plan.uri)} has not answered within {_OPEN_S:.0f} s")
    state = read_run(run_dir).state
    sink.close("failed" if state == "unfinished" else state)
    return Replayed(uri=plan.uri, run_id=run_id, notices=sink.notices())


def _config(run_dir: Path, uri: str | None) -> RunConfig:
    """Return the run's config, with the output folder where the run's folder is now."""
    path = run_dir / "config.yaml"
    settings = read_settings(path)
    try:
        config = validated_run(settings, path.name)
    except ConfigError as error:
        raise ConfigError(f"{path} is of another version, whose settings are not all known here: {error}") from None
    tracking = config.tracking.model_copy(update={"mlflow_uri": uri or config.tracking.mlflow_uri})
    return config.model_copy(update={"output_dir": run_dir.parent, "tracking": tracking})


def _going_on(run_dir: Path) -> bool:
    """True if a process holds the run's lock."""
    try:
        with (run_dir.parent / f".{run_dir.name}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file, or a file system without locks
        return False
    return False
