"""TensorBoard and W&B: what their own libraries read back is what metrics.jsonl has."""

import json
import math
import struct
import time
from pathlib import Path

import pytest

from qurl_ray.config import RunConfig
from qurl_ray.errors import ConfigError
from qurl_ray.tracking.numbers import event_numbers
from qurl_ray.tracking.tracker import Tracker
from qurl_ray.types import Event


def step(number, **values):
    return Event(
        kind="step", step=number, values={"reward/mean": number / 8, "lr": 1e-5 / number, "note": "x", **values}
    )


def evaluation(number, label, share):
    return Event(kind="evaluation", step=number, message=label, values={"label": label, "eval/accuracy": share})


STORY = [
    evaluation(0, "before", 0.25),
    step(1),
    evaluation(1, "during", 0.5),
    step(2),
    step(3, **{"mismatch/kl": math.nan}),
    evaluation(3, "after", 0.75),
    Event(kind="summary", step=3, values={"steps": 3, "phase_seconds": {"update": 1.5}}),
]


def track(folder: Path, sink: str, events) -> Path:
    config = RunConfig(
        name="demo", steps=3, output_dir=folder, tracking={"mlflow": False, "console": "none", "sinks": [sink]}
    )
    with Tracker(folder / "demo", config, resolved=config.model_dump(mode="json")) as tracker:
        for event in events:
            tracker.handle(event)
    lines = [json.loads(line) for line in (folder / "demo" / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if line["kind"] == "warning"] == []
    return folder / "demo"


def expected(run_dir: Path) -> dict[tuple[str, int], float]:
    """(name, step) → value of metrics.jsonl, the last of each; NaN is null there."""
    found = {}
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        event = Event(kind=line["kind"], step=line["step"], message=line["message"], values=line["values"])
        found |= {(name, event.step): value for name, value in event_numbers(event).items()}
    return found


def finite(values):
    return {key: pytest.approx(value, rel=1e-6) for key, value in values.items() if math.isfinite(value)}


def in_tensorboard(run_dir: Path) -> dict[tuple[str, int], float]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    read = [(name, scalar) for name in events.Tags()["scalars"] for scalar in events.Scalars(name)]
    found = {(name, scalar.step): scalar.value for name, scalar in read}
    assert len(found) == len(read)  # nothing is there twice
    return found


def logged(data: bytes):
    """The records of a W&B file: LevelDB's log after a header of 7 bytes, in blocks of 32 KiB."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        part = data[place + 7 : place + 7 + size]
        place += 7 + size
        whole = part if kind in (1, 2) else whole + part  # full, first; middle, last
        if kind in (1, 4):
            yield whole


def in_wandb(run_dir: Path) -> tuple[dict[tuple[str, int], float], dict]:
    from wandb.proto.wandb_internal_pb2 import Record

    found, summary = {}, {}
    for file in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in logged(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "step" in row:
                found |= {(name, row["step"]): value for name, value in row.items() if not name.startswith("_")}
            summary |= {item.key: json.loads(item.value_json) for item in record.summary.update}
    return {key: value for key, value in found.items() if key[0] != "step" and math.isfinite(value)}, summary


def test_numbers_of_evaluations_as_rolled_out_have_names_of_their_own():
    assert event_numbers(STORY[2]) == {"eval_rollout/accuracy": 0.5}
    assert event_numbers(STORY[0]) == {"eval/accuracy": 0.25}
    assert event_numbers(STORY[-1]) == {"summary/steps": 3.0, "summary/phase_seconds/update": 1.5}


def test_tensorboard_reads_what_metrics_jsonl_has(tmp_path):
    run_dir = track(tmp_path, "tensorboard", STORY)
    found = in_tensorboard(run_dir)
    assert {key: value for key, value in found.items() if math.isfinite(value)} == finite(expected(run_dir))
    assert math.isnan(found["mismatch/kl", 3])


def test_in_tensorboard_a_run_that_resumes_replaces_what_it_repeats(tmp_path):
    """Stopped after step 3, resumed from the checkpoint of step 1, and with ranks that restart from step 2."""
    track(tmp_path, "tensorboard", STORY[:5])
    again = [step(2, extra=1.0), step(3, extra=2.0), step(2, extra=3.0), step(3, extra=4.0)]
    found = in_tensorboard(track(tmp_path, "tensorboard", again))
    assert [found["extra", number] for number in (2, 3)] == [3.0, 4.0]
    assert {number for name, number in found if name == "reward/mean"} == {1, 2, 3}
    assert ("mismatch/kl", 3) not in found


def test_wandb_reads_what_metrics_jsonl_has_and_a_run_goes_on(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb.Settings, "_start_datetime", "20260131_120000")  # both starts are in one second
    run_dir = track(tmp_path, "wandb", STORY[:4])
    first = (run_dir / "wandb_run_id").read_text()
    track(tmp_path, "wandb", [step(2, extra=1.0), *STORY[4:]])
    assert (run_dir / "wandb_run_id").read_text() == first
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 2, "both starts in one folder"
    wanted = {key: value for key, value in expected(run_dir).items() if not key[0].startswith("summary/")}
    deadline = time.monotonic() + 200  # W&B's own process writes the last records, on a busy machine later
    while in_wandb(run_dir)[0] != finite(wanted) and time.monotonic() < deadline:
        time.sleep(0.2)
    found, summary = in_wandb(run_dir)
    assert found == finite(wanted)
    assert summary["summary/steps"] == 3


def test_a_package_that_is_missing_is_named_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match="sink 'wandb': cannot import wandb"):
        track(tmp_path, "wandb", [])


# --- Ray's metrics and Grafana -------------------------------------------------------------------------------------


def test_the_dashboard_of_the_repository_is_the_one_that_is_made():
    from qurl_ray.tracking.grafana import dashboard

    stored = json.loads((Path(__file__).parents[2] / "cluster" / "grafana.json").read_text())
    assert stored == json.loads(json.dumps(dashboard())), "python -m qurl_ray.tracking.grafana > cluster/grafana.json"
    shown = [panel for panel in stored["panels"] if panel["type"] == "timeseries"]
    assert len({panel["id"] for panel in stored["panels"]}) == len(stored["panels"])
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in stored["panels"]}
    assert len(places) == len(stored["panels"])
    assert all(0 <= p["gridPos"]["x"] <= 16 for p in shown)


@pytest.mark.ray
@pytest.mark.slow
def test_prometheus_finds_the_gauges_that_the_dashboard_shows(tmp_path):
    """A scrape of the node's exporter, as Prometheus does it, after steps with every metric of a run."""
    import re
    import time
    import urllib.request

    import ray

    from qurl_ray.report.catalog import charts
    from qurl_ray.tracking.grafana import dashboard

    ray.init("local", num_cpus=1, include_dashboard=True, log_to_driver=False)
    try:
        wanted = {series.key: 0.5 for chart in charts() for panel in chart.panels for series in panel.series}
        evaluations = [
            Event(kind="evaluation", step=1, message=label, values={"eval/accuracy": 0.25, "eval/reward": 0.125})
            for label in ("before", "during")
        ]
        track(tmp_path, "ray", [Event(kind="step", step=1, values=wanted), *evaluations])
        node = ray.nodes()[0]
        address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        deadline = time.monotonic() + 60
        while True:
            with urllib.request.urlopen(address, timeout=10) as answer:
                page = answer.read().decode()
            found = {line.split("{")[0]: float(line.split()[-1]) for line in page.splitlines() if 'run="demo"' in line}
            shown = {
                re.match(r"\w+", target["expr"])[0]
                for panel in dashboard()["panels"]
                for target in panel.get("targets", [])
            }
            if shown <= set(found) or time.monotonic() > deadline:
                break
            time.sleep(2)
        assert shown - set(found) == set()
        assert found["ray_qurl_eval_rollout_accuracy"] == 0.25
        assert found["ray_qurl_step"] == 1
    finally:
        ray.shutdown()
