import errno
import json
import math
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.config import RunConfig
from qurl_ray.config.tracking import TrackingConfig
from qurl_ray.tracking import Tracker
from qurl_ray.types import Event

sink = pytest.importorskip("qurl_ray.tracking.mlflow_sink")
mlflow = pytest.importorskip("mlflow")
TRACKING = TrackingConfig(console="none")
NO_MLFLOW = TrackingConfig(console="none", mlflow=False)


@pytest.fixture(autouse=True, scope="module")
def _empty_database(tmp_path_factory) -> Path:
    """Made once: its migrations take longer than most tests."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(autouse=True)
def _database(tmp_path, _empty_database):
    shutil.copy(_empty_database, tmp_path)


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
    metrics = sink.event_metrics(Event(kind="summary", step=7, values=values), 2.5)
    assert [(m.key, m.value, m.step, m.timestamp) for m in metrics] == [
        ("summary/a", 1.0, 7, 2500),
        ("summary/d/e", 0.5, 7, 2500),
        ("summary/h", math.inf, 7, 2500),
    ]


def test_a_run_says_which_command_and_commit_it_is_of(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/bin/qurl", "train", "a b.yaml", "tracking.mlflow_uri=http://me:sesame@host"])
    tags = sink.plan_run(tmp_path / "demo", RunConfig(output_dir=tmp_path), {}).tags
    assert tags["mlflow.source.name"].startswith("qurl train 'a b.yaml' ")
    assert "sesame" not in str(tags)
    assert tags["mlflow.source.type"] == "LOCAL"
    assert "int8 rollouts" in tags["mlflow.note.content"]
    assert str(tmp_path / "demo") in tags["mlflow.note.content"]
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    monkeypatch.chdir(tmp_path)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert sink.plan_run(tmp_path, RunConfig(output_dir=tmp_path), {}).tags["mlflow.source.git.commit"] == commit
    monkeypatch.setenv("PATH", "")
    assert "mlflow.source.git.commit" not in sink.plan_run(tmp_path, RunConfig(output_dir=tmp_path), {}).tags


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


# What runs of different versions are compared by: a name that goes, or changes, parts them. New ones may be added.
STABLE = """
    certificate/cost certificate/cost_least certificate/cost_most certificate/equal_tokens certificate/gradient_cosine
    certificate/gradient_ratio
    mismatch/routes_differing router/idle_experts router/load
    acr_active_tokens clip/dual clip/lower clip/upper clip/upper_negative fleet/deaths fleet/healthy fleet/hedged
    fleet/repeated_requests grad_norm guard/beyond guard/level lr mismatch/dropped mismatch/ess mismatch/kl
    mismatch/max_rho mismatch/rejected mismatch/truncated mismatch/weight_ess policy/entropy policy/kl
    policy/kl_reference reward/mean reward/solved_share rollout/garbage_share rollout/mean_length rollout/staleness_max
    rollout/draft_agreement rollout/tokens_per_pass
    rollout/staleness_mean rollout/tokens_per_second rollout/truncated_share sync/bytes_over_bf16 sync/codes_changed
    sync/probe_gap sync/probe_kl sync/probe_kl_keys time/logprob time/reward time/rollout time/sync time/update
    environment/new_rows
environment/turns environment/calls environment/failed_calls environment/waiting environment/failed environment/replays
"""


def test_names_of_metrics_stay():
    from qurl_ray.report.catalog import charts

    names = set(STABLE.split())
    assert {series.key for chart in charts() for panel in chart.panels for series in panel.series} == names
    assert {
        m.key for m in sink.event_metrics(Event(kind="step", step=1, values=dict.fromkeys(names, 1.0)), 1.0)
    } == names


def test_accuracy_as_rolled_out_has_names_of_its_own():
    values = {"eval/accuracy": 0.5, "eval/reward": 0.4, "outcomes": "01", "rewards": [0.1, 0.7]}
    for label, part in (
        ("before", "eval"),
        ("during", "eval_rollout"),
        ("after", "eval"),
        ("after, quantized", "eval_rollout"),
    ):
        metrics = sink.event_metrics(Event(kind="evaluation", step=3, message=label, values=values), 1.0)
        assert {metric.key: metric.value for metric in metrics} == {f"{part}/accuracy": 0.5, f"{part}/reward": 0.4}


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


def test_the_page_of_a_run_shows_the_charts_of_all_training_runs_of_its_experiment(tmp_path):
    run = open_sink(tmp_path / "demo")
    assert run.run_id(30.0)
    run.close("finished")
    experiment = client_of(tmp_path / "demo").get_experiment_by_name("qurl-ray")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert run.page() == (f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}/runs?compareRunsMode=CHART")


def test_the_problems_of_a_run_are_its_data_set(tmp_path):
    run_dir = tmp_path / "demo"
    event = Event(
        kind="info", step=0, message="x", values={"problems": {"digest": "ab" * 16, "train": 9, "held_out": 3}}
    )
    resolved = {"task": {"type": "dataset", "path": "/data/sums.jsonl", "token": "sesame"}}
    run_dir.mkdir()
    run = sink.MlflowSink(
        sink.plan_run(run_dir, RunConfig(output_dir=tmp_path), resolved), run_dir=run_dir, resolved={}
    )
    run.handle(event, 1.0)
    run.close("finished")
    assert run.notices() == []
    (found,) = client_of(run_dir).get_run(run.run_id(0.0)).inputs.dataset_inputs
    assert (found.dataset.name, found.dataset.digest) == ("/data/sums.jsonl", "ab" * 16)
    assert json.loads(found.dataset.profile) == {"digest": "ab" * 16, "train": 9, "held_out": 3}
    assert "sesame" not in found.dataset.source
    assert [(tag.key, tag.value) for tag in found.tags] == [("mlflow.data.context", "train")]


def test_secrets_of_settings_are_not_sent_to_mlflow(tmp_path):
    resolved = {"task": {"params": {"api_key": "sesame", "url": "postgresql://me:sesame@db", "n": 3}}}
    config, folder = RunConfig(output_dir=tmp_path), tmp_path / "one"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(resolved))
    run = sink.MlflowSink(sink.plan_run(folder, config, resolved), run_dir=folder, resolved=resolved)
    run_id = run.run_id(30.0)
    run.close("finished")
    assert run.notices() == []
    told = {"api_key": "…", "url": "postgresql://…@db", "n": 3}
    for name, read in (("config.yaml", yaml.safe_load), ("config.json", json.loads)):
        (sent,) = (tmp_path / "mlartifacts").rglob(name)
        assert read(sent.read_text()) == {"task": {"params": told}}
    params = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(run_id).data.params
    assert params == {f"task.params.{key}": str(value) for key, value in told.items()}


def test_more_values_than_fit_in_one_request_are_all_kept(tmp_path):
    config = RunConfig(output_dir=tmp_path)
    resolved = {f"p{i}": i for i in range(230)}
    run = sink.MlflowSink(sink.plan_run(tmp_path, config, resolved), run_dir=tmp_path, resolved=resolved)
    run.handle(Event(kind="step", step=1, values={f"m{i}": i for i in range(1100)}), 1.0)
    run.close("finished")
    assert run.notices() == []
    data = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(run.run_id(0.0)).data
    assert (len(data.params), len(data.metrics)) == (230, 1100)


# --- traces, the machine ------------------------------------------------------------------------------------------


def a_sample(uid: str = "train-1/0", **values) -> dict:
    return {
        "uid": uid,
        "prompt": "12+34=",
        "answer": "46",
        "expected": "46",
        "reward": 1.0,
        "status": "ok",
        "tokens": ["4", "6", "<eos>"],
        "logprobs": [-0.5, -0.2501, -0.001],
        "proximal_logprobs": [-0.5, -0.2, None],
    } | values


def samples(step: int, *found: dict) -> Event:
    return Event(kind="samples", step=step, values={"samples": list(found)})


def traces_of(run_dir: Path) -> list:
    client = client_of(run_dir)
    (experiment,) = [e for e in client.search_experiments() if e.name == "qurl-ray"]
    return client.search_traces(locations=[experiment.experiment_id])


def test_sampled_rollouts_become_traces_with_the_gap_of_every_token(tmp_path):
    run_dir = tmp_path / "demo"
    run = open_sink(run_dir)
    odd = "\ud800 \0 <b> \u202e"  # half a surrogate pair, which a tokenizer may decode to
    failed = a_sample("train-2/0", answer=odd, tokens=[odd], reward=0.0, status="timeout", proximal_logprobs=None)
    run.handle(samples(3, a_sample(), failed), 12.0)
    run.close("finished")
    assert run.notices() == []
    good, bad = sorted(traces_of(run_dir), key=lambda trace: trace.info.tags["uid"])
    assert (good.info.request_preview, good.info.response_preview) == ("12+34=", "46")
    assert good.info.trace_metadata["mlflow.sourceRun"] == run.run_id(0.0)
    wanted = {"step": "3", "uid": "train-1/0", "reward": "1", "largest_gap": "-0.0501"}
    assert wanted.items() <= good.info.tags.items()
    assert [(a.name, a.value, a.source.source_type) for a in good.info.assessments] == [("reward", 1.0, "CODE")]
    root, generated, judged = good.data.spans
    assert (generated.parent_id, judged.parent_id) == (root.span_id, root.span_id)
    assert (root.inputs, root.outputs) == ("12+34=", {"answer": "46", "reward": 1.0, "status": "ok"})
    assert generated.attributes["tokens"] == ["4", "6", "<eos>"]
    assert generated.attributes["logprob_gap"] == [0.0, -0.0501, None]
    assert generated.attributes["mean_abs_gap"] == pytest.approx(0.0501 / 2)
    assert judged.inputs["expected"] == "46"
    assert (good.info.state, bad.info.state) == ("OK", "ERROR")
    assert "logprob_gap" not in bad.data.spans[1].attributes
    assert bad.info.response_preview == "? ? <b> \u202e"


def test_the_same_sample_is_one_trace_however_often_it_is_sent(tmp_path):
    run_dir = tmp_path / "demo"
    run = open_sink(run_dir)
    for at in (1.0, 2.0):
        run.handle(samples(3, a_sample()), at)
    run.handle(samples(4, a_sample()), 3.0)
    run.close("finished")
    assert run.notices() == []
    found = traces_of(run_dir)
    assert sorted(trace.info.tags["step"] for trace in found) == ["3", "4"]
    assert [len(trace.info.assessments) for trace in found] == [1, 1]


def test_the_machines_use_is_recorded_under_mlflows_names(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    run_dir = tmp_path / "demo"
    run = open_sink(run_dir)
    deadline = time.monotonic() + 120
    name = "system/cpu_utilization_percentage"
    client = client_of(run_dir) if run.run_id(30.0) else None
    while name not in client.get_run(run.run_id(0.0)).data.metrics and time.monotonic() < deadline:
        time.sleep(0.1)
    run.close("finished")
    assert run.notices() == []
    metrics = client.get_run(run.run_id(0.0)).data.metrics
    assert {name, "system/system_memory_usage_megabytes", "system/network_receive_megabytes"} <= set(metrics)


# --- what a server missed -----------------------------------------------------------------------------------------


def test_what_was_lost_on_the_way_is_made_good_at_the_end(tmp_path, monkeypatch):
    run_dir = tmp_path / "demo"
    log = sink._OpenRun.log

    def refuse(run, metrics):
        if not made_good and any(metric.step in (2, 3) for metric in metrics):
            raise ValueError("no")
        log(run, metrics)

    made_good = []
    make_good = sink.MlflowSink._make_good
    monkeypatch.setattr(sink._OpenRun, "log", refuse)
    monkeypatch.setattr(sink.MlflowSink, "_make_good", lambda self: made_good.append(1) or make_good(self))
    config = RunConfig(output_dir=tmp_path, name="demo", tracking=TRACKING)
    with Tracker(run_dir, config, resolved={}) as tracker:
        for number in (1, 2, 3, 4):
            tracker.handle(step(number, number / 10))
    history = client_of(run_dir).get_metric_history(tracker.mlflow_run_id(), "reward/mean")
    assert sorted((m.step, m.value) for m in history) == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (warning,) = [event["message"] for event in events if event["kind"] == "warning"]
    assert "MLflow failed (ValueError: no)" in warning  # and nothing of what it would lack
    times = {event["step"]: int(1000 * event["time"]) for event in events if event["kind"] == "step"}
    assert {m.step: m.timestamp for m in history} == times


def test_the_records_of_a_killed_process_are_made_good_when_its_run_goes_on(tmp_path):
    run_dir = tmp_path / "demo"
    config = RunConfig(output_dir=tmp_path, name="demo", tracking=TRACKING)
    killed = Tracker(run_dir, config.model_copy(update={"tracking": NO_MLFLOW}), resolved={})
    for number in (1, 2, 3):
        killed.handle(step(number, number / 10))
        killed.handle(samples(number, a_sample(f"train-{number}/0")))
    killed.handle(Event(kind="warning", step=3, message="odd"))
    with Tracker(run_dir, config, resolved={}) as tracker:
        tracker.rewind(2)
        tracker.handle(step(3, 0.7))
    run = client_of(run_dir).get_run(tracker.mlflow_run_id())
    history = client_of(run_dir).get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((m.step, m.value) for m in history) == [(1, 0.1), (2, 0.2), (3, 0.7)]
    assert sorted(trace.info.tags["step"] for trace in traces_of(run_dir)) == ["1", "2"]
    assert (run.data.tags["warnings"], run.data.tags["last_warning"]) == ("1", "odd")


def test_a_server_that_accepts_and_never_answers_delays_no_step_and_the_end_little(tmp_path, monkeypatch):
    """400 requests that wait for a second each would take `waits_s`."""
    waits_s = 400
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracking = TRACKING.model_copy(update={"mlflow_uri": uri})
        tracker = Tracker(tmp_path / "demo", RunConfig(output_dir=tmp_path, tracking=tracking), resolved={})
        began = time.monotonic()
        for number in range(1, 201):
            tracker.handle(step(number, 0.5))
            tracker.handle(samples(number, a_sample()))
        assert time.monotonic() - began < waits_s / 4, "steps wait for answers"
        assert tracker.mlflow_run_id(0.1) is None
        began = time.monotonic()
        tracker.close("finished")
        assert time.monotonic() - began < waits_s / 4, "the end waits for all answers"
    told = [json.loads(line)["message"] for line in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()]
    (warning,) = filter(None, told)
    assert "MLflow failed" in warning
    assert "retrying in the background" in warning


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
    assert f"MLflow run {old}, which this run resumes, is not in sqlite:///" in notice
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
    assert {"report.html", "summary.json"} <= {a.path for a in client.list_artifacts(latest.run_id)}
    (output,) = client.get_run(latest.run_id).outputs.model_outputs
    logged = client.get_logged_model(output.model_id)
    assert (logged.source_run_id, logged.name, str(logged.status)) == (latest.run_id, "policy", "READY")
    assert latest.source == logged.artifact_location
    source = client.get_model_version_download_uri(latest.name, latest.version)
    pipeline = mlflow.transformers.load_model(source)
    assert type(pipeline.model).__name__ == "Qwen2ForCausalLM"
    assert pipeline.tokenizer("1+2=").input_ids


def test_the_policy_has_a_signature_and_answers_as_it_says(tmp_path, tiny_spec):
    run_dir = tmp_path / "demo"
    leave_policy(run_dir, tiny_spec)
    run = open_sink(run_dir)
    run.close("finished")
    source = client_of(run_dir).get_model_version_download_uri("qurl-ray-demo", "1")
    model = mlflow.pyfunc.load_model(source)
    signature = model.metadata.signature
    assert [column.type.name for column in signature.inputs] == ["string"]
    assert [column.type.name for column in signature.outputs] == ["string"]
    assert {param.name: param.default for param in signature.params} == {
        "max_new_tokens": 64,
        "do_sample": False,
        "return_full_text": False,
    }
    pipeline = mlflow.transformers.load_model(source)
    (expected,) = pipeline("1+2=", max_new_tokens=3, do_sample=False, return_full_text=False)
    assert model.predict(["1+2="], params={"max_new_tokens": 3}) == [expected["generated_text"]]
    with pytest.raises(mlflow.MlflowException, match="Incompatible input types"):
        model.predict([1.5])
    requirements = (Path(mlflow.artifacts.download_artifacts(source)) / "requirements.txt").read_text()
    assert "\ntransformers==" in requirements


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
        (experiment,) = [e.experiment_id for e in client_of(run_dir).search_experiments() if e.name == "qurl-ray"]
        (logged,) = client_of(run_dir).search_logged_models([experiment])
        assert logged.tags["steps"] == steps


@pytest.mark.parametrize("content", [b"[]", b"3", b"{", b"\xff", b"[" * 100_000])
def test_a_summary_that_is_none_gives_a_policy_without_tags(tmp_path, tiny_spec, content):
    run_dir = tmp_path / "demo"
    leave_policy(run_dir, tiny_spec)
    (run_dir / "summary.json").write_bytes(content)
    run = open_sink(run_dir)
    run.close("finished")
    assert run.notices() == []
    (version,) = client_of(run_dir).search_model_versions("name='qurl-ray-demo'")
    assert version.tags == {}


def test_a_store_on_the_same_disk_takes_no_room_for_weights(tmp_path, tiny_spec):
    run_dir = tmp_path / "my runs [1] 100%" / "demo"
    run_dir.mkdir(parents=True)
    for _ in range(2):  # a policy is replaced when its run is resumed
        shutil.copytree(tiny_spec.source, run_dir / "policy")
        open_sink(run_dir).close("finished")
        (version,) = client_of(run_dir).search_model_versions("name='qurl-ray-demo'")
        kept = Path(mlflow.artifacts.download_artifacts(version.source))
        (weights,) = (run_dir / "policy").glob("*.safetensors")
        assert weights.samefile(kept / weights.name)
        shutil.rmtree(run_dir / "policy")
        assert mlflow.transformers.load_model(version.source)


def test_a_store_on_another_disk_gets_copies(tmp_path, tiny_spec, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    run_dir = tmp_path / "demo"
    leave_policy(run_dir, tiny_spec)
    open_sink(run_dir).close("finished")
    (version,) = client_of(run_dir).search_model_versions("name='qurl-ray-demo'")
    (weights,) = (run_dir / "policy").glob("*.safetensors")
    kept = Path(mlflow.artifacts.download_artifacts(version.source)) / weights.name
    assert kept.read_bytes() == weights.read_bytes()
    assert not weights.samefile(kept)


def test_a_large_policy_is_referred_to_and_not_copied(tmp_path, tiny_spec, monkeypatch):
    monkeypatch.setattr(sink.mlflow_policy, "_COPY_LIMIT_BYTES", 1000)
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
    monkeypatch.setattr(sink.mlflow_policy, "register_policy", lambda *_: [][0])
    run = open_sink(run_dir)
    run.close("finished")
    (notice,) = run.notices()
    assert "MLflow did not register the policy (IndexError: list index out of range); it is in" in notice
    assert client_of(run_dir).get_run(run.run_id(0.0)).info.status == "FINISHED"
