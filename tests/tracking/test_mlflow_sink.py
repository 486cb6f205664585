import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.config import RunConfig
from qurl_ray.config.models import TrackingConfig

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
    from qurl_ray.types import Event

    config = RunConfig(output_dir=tmp_path)
    resolved = {f"p{i}": i for i in range(230)}
    run = sink.MlflowSink(sink.plan_run(tmp_path, config, resolved), run_dir=tmp_path, resolved=resolved)
    run.handle(Event(kind="step", step=1, values={f"m{i}": i for i in range(1100)}), 1.0)
    run.close("finished")
    assert run.notices() == []
    data = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(run.run_id(0.0)).data
    assert (len(data.params), len(data.metrics)) == (230, 1100)
