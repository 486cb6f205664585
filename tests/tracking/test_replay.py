"""What a server did not get, sent from the run's folder; at the end with real servers that come and go."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from qurl_ray.config import RunConfig
from qurl_ray.config.tracking import TrackingConfig
from qurl_ray.errors import ConfigError
from qurl_ray.tracking import Tracker
from qurl_ray.tracking.replay import replay
from qurl_ray.types import Event
from tests.mlflow_server import Server

mlflow = pytest.importorskip("mlflow")
ROOT = Path(__file__).parents[2]
SAMPLE = {
    "uid": "a/0",
    "prompt": "1+1=",
    "answer": "2",
    "reward": 1.0,
    "status": "ok",
    "tokens": ["2"],
    "logprobs": [-0.1],
}


def a_run(folder: Path, steps: int = 3, *, name: str = "demo", **tracking) -> Path:
    """The folder of a run of so many steps, tracked by nothing but its files unless told otherwise."""
    settings = TrackingConfig(**({"console": "none", "mlflow": False} | tracking))
    config = RunConfig(output_dir=folder, name=name, steps=steps, tracking=settings)
    run_dir = folder / name
    with Tracker(run_dir, config, resolved=config.model_dump(mode="json")) as tracker:
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        tracker.handle(Event(kind="evaluation", step=0, message="before", values={"eval/accuracy": 0.25}))
        for n in range(1, steps + 1):
            tracker.handle(Event(kind="step", step=n, values={"reward/mean": n / 10, "time/step": float("nan")}))
            tracker.handle(Event(kind="samples", step=n, values={"samples": [SAMPLE | {"proximal_logprobs": [-0.3]}]}))
        tracker.handle(Event(kind="warning", step=2, message="odd"))
        summary = {"accuracy_after": 0.5, "interrupted": False}
        (run_dir / "summary.json").write_text(json.dumps(summary | {"steps": steps}))
        tracker.handle(Event(kind="summary", step=steps, values=summary))
    return run_dir


def kept(uri: str, run_id: str) -> dict:
    """Everything that is told of a run, but for its artifacts' contents."""
    client = mlflow.MlflowClient(uri, uri)
    run = client.get_run(run_id)
    traces = client.search_traces(locations=[run.info.experiment_id], run_id=run_id, max_results=500)
    histories = {name: client.get_metric_history(run_id, name) for name in run.data.metrics}
    return {
        "status": run.info.status,
        "times": (run.info.start_time, run.info.end_time),
        "tags": {key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.")},
        "metrics": {name: sorted((m.step, m.timestamp, m.value) for m in found) for name, found in histories.items()},
        "traces": sorted(
            (t.info.trace_id, t.info.request_time, t.data.spans[1].attributes["logprob_gap"][0]) for t in traces
        ),
        "artifacts": sorted(artifact.path for artifact in client.list_artifacts(run_id)),
        "runs": len(client.search_runs([run.info.experiment_id])),
    }


def test_a_run_without_mlflow_is_sent_afterwards_and_sending_it_twice_changes_nothing(tmp_path):
    run_dir = a_run(tmp_path)
    done = replay(run_dir)
    assert done.notices == []
    assert done.uri == f"sqlite:///{tmp_path}/mlflow.db"
    found = kept(done.uri, done.run_id)
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = {event["step"]: int(1000 * event["time"]) for event in events if event["kind"] == "step"}
    assert found["metrics"] == {
        "eval/accuracy": [(0, int(1000 * events[0]["time"]), 0.25)],
        "reward/mean": [(n, times[n], n / 10) for n in (1, 2, 3)],
        "summary/accuracy_after": [(3, int(1000 * events[-1]["time"]), 0.5)],
    }
    assert [gap for _, _, gap in found["traces"]] == [0.2] * 3
    assert found["times"] == (int(1000 * events[0]["time"]), int(1000 * events[-1]["time"]))
    assert (found["status"], found["tags"]["warnings"], found["runs"]) == ("FINISHED", "1", 1)
    assert {"config.yaml", "metrics.jsonl", "summary.json", "events.jsonl"} <= set(found["artifacts"])
    again = replay(run_dir)
    assert again == done
    assert kept(done.uri, done.run_id) == found


def test_only_what_is_missing_is_sent(tmp_path):
    run_dir = a_run(tmp_path, mlflow=True)
    uri, run_id = f"sqlite:///{tmp_path}/mlflow.db", (run_dir / "mlflow_run_id").read_text()
    found = kept(uri, run_id)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"kind": "step", "step": 4, "time": 2e9, "message": "", "values": {"reward/mean": 0.4}}) + "\n"
        )
        file.write('{"kind": "step", "step": 5, "ti')  # the process was killed
    replay(run_dir)
    now = kept(uri, run_id)
    assert now["metrics"].pop("reward/mean") == [*found["metrics"].pop("reward/mean"), (4, 2_000_000_000_000, 0.4)]
    # What JSON cannot hold is in MLflow alone, and stays there.
    assert [step for step, _, _ in now["metrics"].pop("time/step")] == [1, 2, 3]
    found["metrics"].pop("time/step")
    assert (now["metrics"], now["traces"]) == (found["metrics"], found["traces"])


def test_a_run_that_left_no_summary_has_failed(tmp_path):
    run_dir = a_run(tmp_path)
    (run_dir / "summary.json").unlink()
    done = replay(run_dir)
    assert kept(done.uri, done.run_id)["status"] == "FAILED"


def test_what_cannot_be_sent_is_an_error_that_says_why(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no metrics\.jsonl"):
        replay(tmp_path / "nothing")
    run_dir = a_run(tmp_path)
    with (tmp_path / ".demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="still going on"):
            replay(run_dir)
    with pytest.raises(ConfigError, match="MLflow failed"):
        replay(run_dir, "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="the URI of MLflow is no address"):
        replay(run_dir, "nosuchhost")
    (run_dir / "config.yaml").write_text("steps: 3\nlearner: {no_such: 1}\n")
    with pytest.raises(ConfigError, match=r"another version.*learner\.no_such"):
        replay(run_dir)


DAMAGED = [b"name: \xff", b"[]", b"", b"steps: [", b"steps: " + b"1" * 5000, b"steps: 1\nsteps: 2"]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_settings_are_an_error_that_names_the_file(tmp_path, content):
    run_dir = a_run(tmp_path)
    (run_dir / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.yaml") as caught:
        replay(run_dir)
    assert len(str(caught.value)) < 500


def test_a_password_is_nowhere_in_what_a_run_leaves_and_is_asked_for_again(tmp_path, monkeypatch, capfd):
    """SQLite passes a file's URI on with all that it does not know."""
    monkeypatch.chdir(tmp_path)  # where MLflow makes a folder for such a database
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = f"sqlite:///file:{tmp_path}/mlflow.db?uri=true&token=sesame"
    run_dir = a_run(tmp_path, mlflow=True, mlflow_uri=uri, console="plain")
    assert "mlflow_uri" in (run_dir / "config.yaml").read_text()
    found = kept(uri, (run_dir / "mlflow_run_id").read_text())
    assert {"config.yaml", "config.json"} <= set(found["artifacts"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"sesame" in path.read_bytes()]
    with pytest.raises(ConfigError, match=r"\?…, was written without its password: set \$MLFLOW_TRACKING_URI"):
        replay(run_dir)
    assert replay(run_dir, uri).notices == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert replay(run_dir).run_id == (run_dir / "mlflow_run_id").read_text()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"sesame" in path.read_bytes()]
    assert "sesame" not in "".join(capfd.readouterr())


def test_the_job_sends_several_runs_and_hides_passwords(tmp_path, monkeypatch):
    from qurl_ray.cli import track

    runs = [str(a_run(tmp_path, name=name)) for name in ("one", "two")]
    done = CliRunner().invoke(app_of(track.main), runs)
    assert done.exit_code == 0, done.output
    assert [line.split(" is run ")[0] for line in done.stdout.splitlines()] == runs
    done = CliRunner().invoke(app_of(track.main), [str(tmp_path / "none")])
    assert (done.exit_code, done.stderr.startswith("error: ")) == (2, True)
    monkeypatch.setattr(track, "replay", lambda run, uri: track_result(uri))
    done = CliRunner().invoke(app_of(track.main), [runs[0], "--uri", "postgresql://me:secret@db/mlflow"])
    assert "secret" not in done.output


def app_of(main):
    import typer

    app = typer.Typer()
    app.command()(main)
    return app


def track_result(uri: str):
    from qurl_ray.tracking.replay import Replayed

    return Replayed(uri=uri, run_id="0" * 32, notices=[])


# --- real servers -------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    found = Server(tmp_path)
    yield found
    found.kill()


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_lacks_nothing_and_costs_the_training_nothing(tmp_path, server):
    server.start()
    tracking = TrackingConfig(console="none", mlflow_uri=server.uri)
    config = RunConfig(output_dir=tmp_path, name="demo", steps=120, tracking=tracking)
    tracker = Tracker(tmp_path / "demo", config, resolved={})
    run_id = tracker.mlflow_run_id()
    assert run_id
    seconds = []
    for n in range(1, 121):
        began = time.perf_counter()
        tracker.handle(Event(kind="step", step=n, values={"reward/mean": n / 10}))
        tracker.handle(Event(kind="samples", step=n, values={"samples": [SAMPLE] if n % 10 == 0 else []}))
        seconds.append(time.perf_counter() - began)
        time.sleep(0.01)
        if n == 30:
            server.kill()
        if n == 90:
            server.start()
    tracker.close("finished")
    sys.stdout.write(
        f"a step's events: median {1e6 * sorted(seconds)[60]:.0f} µs, largest {1e3 * max(seconds):.1f} ms\n"
    )
    assert sorted(seconds)[60] < 0.002
    assert max(seconds) < 0.5
    client = mlflow.MlflowClient(server.uri)
    history = client.get_metric_history(run_id, "reward/mean")
    assert sorted((m.step, m.value) for m in history) == [(n, n / 10) for n in range(1, 121)]
    experiment = client.get_run(run_id).info.experiment_id
    assert len(client.search_traces(locations=[experiment], run_id=run_id, max_results=100)) == 12
    assert client.get_run(run_id).info.status == "FINISHED"


@pytest.mark.slow
def test_a_server_that_stays_away_is_sent_the_run_later(tmp_path, server):
    server.start()
    tracking = TrackingConfig(console="none", mlflow_uri=server.uri)
    config = RunConfig(output_dir=tmp_path, name="demo", steps=20, tracking=tracking)
    run_dir = tmp_path / "demo"
    tracker = Tracker(run_dir, config, resolved={})
    run_id = tracker.mlflow_run_id()
    server.kill()
    for n in range(1, 21):
        tracker.handle(Event(kind="step", step=n, values={"reward/mean": n / 10}))
        tracker.handle(Event(kind="samples", step=n, values={"samples": [SAMPLE | {"proximal_logprobs": [-0.3]}]}))
    began = time.monotonic()
    tracker.close("finished")
    assert time.monotonic() - began < 10
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["message"]
    assert f"qurl track {run_dir} sends them" in last
    server.start()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "jobs/track.py", str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, f"{run_dir} is run {run_id} in {server.uri}\n"), done.stderr
        found = kept(server.uri, run_id)
        assert [(step, value) for step, _, value in found["metrics"]["reward/mean"]] == [
            (n, n / 10) for n in range(1, 21)
        ]
        assert (len(found["traces"]), found["runs"]) == (20, 1)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("pg_ctlcluster"), reason="no PostgreSQL of Debian's here")
def test_postgresql_holds_the_same(tmp_path):
    driver = pytest.importorskip("psycopg2", reason="pip install psycopg2-binary")
    (home,) = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1:]
    data, port = tmp_path / "data", Server(tmp_path).port
    as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.getuid() == 0 else []
    data.mkdir()
    if as_user:
        for folder in (data, *list(data.parents)[:3]):
            folder.chmod(0o755)
        shutil.chown(data, "postgres")
        data.chmod(0o700)
    initdb = [*as_user, str(home / "initdb"), "-A", "trust", "-U", "mlflow", "-D", str(data)]
    subprocess.run(initdb, check=True, capture_output=True)
    serve = [*as_user, str(home / "postgres"), "-D", str(data), "-p", str(port), "-k", str(data), "-h", "127.0.0.1"]
    process = subprocess.Popen(serve, stderr=subprocess.DEVNULL)
    try:
        uri = f"postgresql+psycopg2://mlflow@127.0.0.1:{port}/postgres"
        for _ in range(100):
            try:
                driver.connect(uri.replace("+psycopg2", "")).close()
                break
            except driver.OperationalError:
                time.sleep(0.2)
        done = replay(a_run(tmp_path), uri)
        assert done.notices == []
        found = kept(uri, done.run_id)
        assert [value for _, _, value in found["metrics"]["reward/mean"]] == [0.1, 0.2, 0.3]
        assert len(found["traces"]) == 3
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
