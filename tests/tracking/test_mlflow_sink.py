import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.config import RunConfig
from qurl_ray.config.models import TrackingConfig
from qurl_ray.types import Event

sink = pytest.importorskip("qurl_ray.tracking.mlflow_sink")
mlflow = pytest.importorskip("mlflow")


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=300) | st.from_regex(r"[./a:?]{0,12}", fullmatch=True))
def test_every_name_becomes_one_that_mlflow_accepts(key):
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(sink.metric_name(key))


def test_good_names_stay_as_they_are():
    for name in ("mismatch/kl", "phase_seconds/rollout", "lr", "algorithm.clip_low"):
        assert sink.metric_name(name) == name


def test_only_numbers_become_metrics():
    values = {"a": 1, "b": "text", "c": True, "d": {"e": 0.5}, "f": None, "g": [1, 2], "h": math.inf}
    metrics = sink.to_metrics(values, step=7, at=2.5, prefix="summary/")
    assert [(m.key, m.value, m.step, m.timestamp) for m in metrics] == [
        ("summary/a", 1.0, 7, 2500),
        ("summary/d/e", 0.5, 7, 2500),
        ("summary/h", math.inf, 7, 2500),
    ]


def test_the_database_lies_in_the_output_folder_unless_an_address_is_given(tmp_path):
    plan = sink.plan_run(tmp_path / "demo", RunConfig(output_dir=tmp_path), {"a": {"b": "x" * 9000}})
    assert plan.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert plan.artifact_root == tmp_path / "mlartifacts"
    assert plan.params == {"a.b": "x" * 6000}
    remote = RunConfig(output_dir=tmp_path, tracking=TrackingConfig(mlflow_uri="http://host:5000"))
    plan = sink.plan_run(tmp_path / "demo", remote, {})
    assert (plan.uri, plan.artifact_root) == ("http://host:5000", None)


def test_a_busy_server_is_worth_another_try_and_a_refusal_is_not():
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, TEMPORARILY_UNAVAILABLE

    assert sink.is_transient(MlflowException("busy", error_code=TEMPORARILY_UNAVAILABLE))
    assert sink.is_transient(ConnectionResetError())
    assert not sink.is_transient(MlflowException("bad name", error_code=INVALID_PARAMETER_VALUE))
    assert not sink.is_transient(FileNotFoundError())


def test_two_runs_share_an_experiment_also_in_a_folder_with_odd_characters(tmp_path: Path):
    folder = tmp_path / "my runs [1] 100%"
    folder.mkdir()
    config = RunConfig(output_dir=folder)
    ids = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        run = sink.MlflowSink(sink.plan_run(folder / name, config, {}), run_dir=folder / name, resolved={"k": 1})
        ids.append(run.run_id(30.0))
        run.close("finished")
        assert run.notices() == []
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    assert len({client.get_run(run_id).info.experiment_id for run_id in ids}) == 1
    assert len(list((folder / "mlartifacts").rglob("config.json"))) == 2


def test_more_values_than_fit_in_one_request_are_all_kept(tmp_path):
    config = RunConfig(output_dir=tmp_path)
    resolved = {f"p{i}": i for i in range(230)}
    run = sink.MlflowSink(sink.plan_run(tmp_path, config, resolved), run_dir=tmp_path, resolved=resolved)
    run.handle(Event(kind="step", step=1, values={f"m{i}": i for i in range(1100)}), 1.0)
    run.close("finished")
    assert run.notices() == []
    data = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(run.run_id(0.0)).data
    assert (len(data.params), len(data.metrics)) == (230, 1100)


# --- going on ----------------------------------------------------------------------------------------------------


def open_sink(run_dir: Path, **plan):
    run_dir.mkdir(exist_ok=True)
    config = RunConfig(output_dir=run_dir.parent, name=run_dir.name, **plan)
    return sink.MlflowSink(sink.plan_run(run_dir, config, {"lr": 1}), run_dir=run_dir, resolved={"lr": 1})


def client_of(run_dir: Path):
    return mlflow.MlflowClient(f"sqlite:///{run_dir.parent}/mlflow.db", f"sqlite:///{run_dir.parent}/mlflow.db")


def step(number: int, reward: float) -> Event:
    return Event(kind="step", step=number, values={"reward/mean": reward})


def test_a_run_that_is_gone_on_with_stays_one_mlflow_run_without_repeated_steps(tmp_path):
    run_dir = tmp_path / "demo"
    first = open_sink(run_dir)
    for number in (1, 2, 3):
        first.handle(step(number, number / 10), float(number))
    first.handle(Event(kind="warning", step=3, message="odd"), 3.0)
    first.close("interrupted")
    run_id = first.run_id(0.0)
    assert (run_dir / "mlflow_run_id").read_text() == run_id
    second = open_sink(run_dir)  # from a checkpoint of step 1
    assert second.run_id(30.0) == run_id
    assert client_of(run_dir).get_run(run_id).info.status == "RUNNING"
    for number in (2, 3, 4):
        second.handle(step(number, number / 10), 10.0 + number)
    second.handle(Event(kind="evaluation", step=3, values={"eval/accuracy": 0.5}), 14.0)
    second.handle(Event(kind="warning", step=4, message="odd"), 14.0)
    second.close("finished")
    assert first.notices() == second.notices() == []
    client = client_of(run_dir)
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "reward/mean")] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 0.4),
    ]
    run = client.get_run(run_id)
    assert (run.info.status, run.data.params, run.data.tags["warnings"]) == ("FINISHED", {"lr": "1"}, "2")
    assert run.data.metrics["eval/accuracy"] == 0.5
    assert len(client.search_runs([run.info.experiment_id])) == 1


@pytest.mark.parametrize("gone", ["never there", "deleted"])
def test_a_run_that_is_not_in_the_store_is_made_anew_and_said_so(tmp_path, gone):
    run_dir = tmp_path / "demo"
    first = open_sink(run_dir)
    first.close("interrupted")
    old = first.run_id(0.0)
    if gone == "deleted":
        client_of(run_dir).delete_run(old)
    else:
        old = "0" * 32
        (run_dir / "mlflow_run_id").write_text(old + "\n")
    second = open_sink(run_dir)
    new = second.run_id(30.0)
    second.handle(step(1, 0.5), 1.0)
    second.close("finished")
    (notice,) = second.notices()
    assert f"MLflow run {old}, which this one goes on with, is not in sqlite:///" in notice
    assert new != old
    assert (run_dir / "mlflow_run_id").read_text() == new
    assert client_of(run_dir).get_run(new).data.metrics == {"reward/mean": 0.5}


# --- the policy --------------------------------------------------------------------------------------------------


def leave_policy(run_dir: Path, tiny_spec) -> None:
    """What a run leaves before it closes its tracker."""
    run_dir.mkdir(parents=True)
    (run_dir / "policy").symlink_to(tiny_spec.source)
    (run_dir / "report.html").write_text("<html></html>")
    summary = {"accuracy_before": 0.25, "accuracy_after": 0.75, "steps": 9, "correction": "acr", "uaq_scale": None}
    (run_dir / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize("outcome", ["finished", "interrupted"])
def test_the_policy_becomes_a_version_that_mlflow_loads(tmp_path, tiny_spec, outcome):
    run_dir = tmp_path / "my runs [1] 100%" / "demo"
    leave_policy(run_dir, tiny_spec)
    for _ in range(2):
        (run_dir / "mlflow_run_id").unlink(missing_ok=True)
        run = open_sink(run_dir, tracking=TrackingConfig(experiment="a/b: c"))
        run.close(outcome)
        assert run.notices() == []
    client = client_of(run_dir)
    versions = client.search_model_versions("name='a_b_ c-demo'")
    assert sorted(int(v.version) for v in versions) == [1, 2]
    latest = max(versions, key=lambda v: int(v.version))
    assert latest.run_id == run.run_id(0.0)
    assert latest.tags == {"accuracy_before": "0.25", "accuracy_after": "0.75", "steps": "9", "correction": "acr"}
    assert {"report.html", "policy", "summary.json"} <= {a.path for a in client.list_artifacts(latest.run_id)}
    pipeline = mlflow.transformers.load_model(client.get_model_version_download_uri(latest.name, latest.version))
    assert type(pipeline.model).__name__ == "Qwen2ForCausalLM"
    assert pipeline.tokenizer("1+2=").input_ids


def test_a_run_that_is_gone_on_with_keeps_its_version(tmp_path, tiny_spec):
    run_dir = tmp_path / "demo"
    leave_policy(run_dir, tiny_spec)
    for outcome, steps in (("interrupted", "9"), ("finished", "12")):
        (run_dir / "summary.json").write_text(json.dumps({"steps": int(steps)}))
        run = open_sink(run_dir)
        run.close(outcome)
        assert run.notices() == []
        (version,) = client_of(run_dir).search_model_versions("name='qurl-ray-demo'")
        assert (version.version, version.tags) == (1, {"steps": steps})


def test_a_large_policy_is_referred_to_and_not_copied(tmp_path, tiny_spec, monkeypatch):
    monkeypatch.setattr(sink, "_COPY_LIMIT_BYTES", 1000)
    run_dir = tmp_path / "demo"
    leave_policy(run_dir, tiny_spec)
    run = open_sink(run_dir)
    run.close("finished")
    assert run.notices() == []
    (version,) = client_of(run_dir).search_model_versions("name='qurl-ray-demo'")
    assert version.source == Path(tiny_spec.source).as_uri()
    assert not list((tmp_path / "mlartifacts").rglob("*.safetensors"))


def test_a_failed_run_registers_nothing_and_a_failed_registration_is_a_notice(tmp_path, tiny_spec, monkeypatch):
    run_dir = tmp_path / "demo"
    leave_policy(run_dir, tiny_spec)
    run = open_sink(run_dir)
    run.close("failed")
    assert run.notices() == []
    assert not client_of(run_dir).search_registered_models()
    monkeypatch.setattr(sink, "_register", lambda *_: [][0])
    run = open_sink(run_dir)
    run.close("finished")
    (notice,) = run.notices()
    assert "MLflow did not register the policy (IndexError: list index out of range); it is in" in notice
    assert client_of(run_dir).get_run(run.run_id(0.0)).info.status == "FINISHED"
