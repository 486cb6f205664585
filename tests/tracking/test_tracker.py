import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from qurl_ray.config import RunConfig
from qurl_ray.config.tracking import TrackingConfig
from qurl_ray.errors import ConfigError
from qurl_ray.tracking import Tracker
from qurl_ray.types import Event

mlflow_tracking = pytest.importorskip("mlflow.tracking")


def a_config(folder: Path, **tracking) -> RunConfig:
    return RunConfig(name="demo", steps=4, output_dir=folder, tracking=TrackingConfig(console="plain", **tracking))


def a_tracker(config: RunConfig, screen: Console | None = None) -> Tracker:
    assert config.output_dir is not None
    screen = screen or Console(file=io.StringIO(), width=200)
    return Tracker(config.output_dir / "demo", config, resolved=config.model_dump(mode="json"), console=screen)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / "demo" / name).read_text().splitlines()]


def warnings(folder: Path) -> list[str]:
    return [line["message"] for line in lines(folder) if line["kind"] == "warning"]


def step(n: int, **values) -> Event:
    return Event(kind="step", step=n, values=values)


def test_a_run_can_be_read_back_from_mlflow(tmp_path, capfd):
    config = a_config(tmp_path)
    values = {"reward/mean": 0.5, "clip/upper": math.nan, "odd:name?": 2, "time": {"rollout": 1.5}, "note": "text"}
    with a_tracker(config) as tracker:
        for n in (1, 2):
            tracker.handle(step(n, **values))
        tracker.handle(Event(kind="warning", step=2, message="KL is high"))
        tracker.handle(Event(kind="samples", step=2, values={"samples": [{"uid": "a/0", "answer": "4"}]}))
        run_id = tracker.mlflow_run_id()
        (tmp_path / "demo" / "summary.json").write_text("{}")
        tracker.handle(Event(kind="summary", step=2, values={"accuracy_after": 0.9, "mlflow_run_id": run_id}))
    assert capfd.readouterr() == ("", "")  # neither MLflow nor its migrations chat
    assert warnings(tmp_path) == ["KL is high"]

    client = mlflow_tracking.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "demo")
    assert client.get_experiment(run.info.experiment_id).name == "qurl-ray"
    history = client.get_metric_history(run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.5)]
    assert run.data.metrics["odd_name_"] == 2
    assert run.data.metrics["time/rollout"] == 1.5
    assert run.data.metrics["summary/accuracy_after"] == 0.9
    assert math.isnan(run.data.metrics["clip/upper"])
    assert run.data.params["algorithm.correction.type"] == "acr"
    assert run.data.params["learner.betas"] == "[0.9, 0.999]"
    tags = {"quantization": "int8", "correction": "acr", "algorithm": "dapo", "warnings": "1"}
    assert tags.items() <= run.data.tags.items()
    kept = {artifact.path for artifact in client.list_artifacts(run_id)}
    assert kept == {"config.json", "summary.json", "samples.jsonl", "metrics.jsonl", "events.jsonl"}
    (stored,) = (tmp_path / "mlartifacts").rglob("config.json")
    assert json.loads(stored.read_text())["rollout"]["quantization"] == "int8"


@pytest.mark.parametrize(("error", "status"), [(RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_mlflow_learns_how_the_run_ended(tmp_path, error, status):
    tracker = a_tracker(a_config(tmp_path))
    with pytest.raises(error), tracker:
        raise error
    client = mlflow_tracking.MlflowClient(tracker.mlflow_uri)
    assert client.get_run(tracker.mlflow_run_id()).info.status == status


def test_a_dead_server_delays_nothing_and_is_announced_once(tmp_path):
    screen = Console(file=io.StringIO(), width=200)
    tracker = a_tracker(a_config(tmp_path, mlflow_uri="http://127.0.0.1:9"), screen)
    for n in range(1, 5):  # MLflow itself tries for minutes, longer than this test may take
        tracker.handle(step(n))
    assert tracker.mlflow_run_id() is None
    tracker.close("finished")
    (warning,) = warnings(tmp_path)
    assert "MLflow failed" in warning
    assert screen.file.getvalue().count("MLflow failed") == 1
    assert [line["step"] for line in lines(tmp_path) if line["kind"] == "step"] == [1, 2, 3, 4]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "uri",
    [
        "http://me:sesame@nosuchhost.invalid:5000",
        "http://me:ses@me@127.0.0.1:9",
        "weird://me:sesame@host",
        "postgresql://me:sesame@127.0.0.1:9/mlflow",
        "http://…@host:5000",
    ],
)
def test_what_fails_is_told_without_passwords(tmp_path, uri, capfd):
    screen = Console(file=io.StringIO(), width=2000)
    with a_tracker(a_config(tmp_path, mlflow_uri=uri), screen) as tracker:
        assert tracker.mlflow_run_id() is None
        tracker.handle(Event(kind="summary", step=1, values={"steps": 1, "mlflow_uri": tracker.mlflow_uri}))
    (warning,) = warnings(tmp_path)
    assert "MLflow" in warning
    assert ("nosuchhost.invalid" in warning) == ("nosuchhost" in uri)
    shown = "".join(capfd.readouterr()) + screen.file.getvalue() + (tmp_path / "demo" / "metrics.jsonl").read_text()
    assert "sesame" not in shown
    assert "ses@me" not in shown


def test_an_address_that_mlflow_does_not_know_is_announced_once(tmp_path):
    with a_tracker(a_config(tmp_path, mlflow_uri="weird://nowhere")) as tracker:
        assert tracker.mlflow_run_id() is None
        tracker.handle(step(1))
    assert len(warnings(tmp_path)) == 1


def test_a_sink_that_fails_is_announced_once_and_the_run_goes_on(tmp_path):
    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("no space left")

    tracker = a_tracker(a_config(tmp_path, mlflow=False), Console(file=ClosedPipe(), width=200))
    for n in (1, 2, 3):
        tracker.handle(step(n, loss=float("inf")))
    tracker.close("failed")
    assert len(warnings(tmp_path)) == 1
    assert "console failed (OSError: no space left)" in warnings(tmp_path)[0]
    assert [line["values"] for line in lines(tmp_path) if line["kind"] == "step"] == [{"loss": None}] * 3


def test_a_closed_pipe_ends_the_output_and_not_the_run(tmp_path):
    """`job | head`: rich would end the process at the first line that nobody reads."""
    script = tmp_path / "job.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from qurl_ray.config import RunConfig\n"
        "from qurl_ray.tracking import Tracker\n"
        "from qurl_ray.types import Event\n"
        "folder = Path(sys.argv[1])\n"
        "config = RunConfig.model_validate({'tracking': {'mlflow': False, 'console': 'plain'}})\n"
        "with Tracker(folder / 'demo', config, resolved={}) as tracker:\n"
        "    for n in range(1, 3001):\n"
        "        tracker.handle(Event(kind='step', step=n))\n"
    )
    job = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE)
    assert job.stdout is not None
    job.stdout.readline()
    job.stdout.close()
    job.wait(timeout=30)
    steps = [line["step"] for line in lines(tmp_path) if line["kind"] == "step"]
    assert steps[-1] == 3000


def test_events_after_the_end_are_ignored(tmp_path):
    tracker = a_tracker(a_config(tmp_path, mlflow=False))
    tracker.close("finished")
    tracker.handle(step(1))
    tracker.close("failed")
    assert lines(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "demo").write_text("a file")
    with pytest.raises(ConfigError, match="set output_dir"):
        a_tracker(a_config(tmp_path, mlflow=False))


def test_mlflow_is_imported_only_by_a_run_that_uses_it():
    code = "import sys, qurl_ray.tracking; assert not {'mlflow', 'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
