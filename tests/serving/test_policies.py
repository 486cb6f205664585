"""Which policy is meant: by folder, run, default or MLflow; and the settings around it."""

import copy
import os
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from qurl_ray.config.serving import ServingConfig, load_serving, serving_app
from qurl_ray.errors import ConfigError
from qurl_ray.serving.deploy import api_key
from qurl_ray.serving.job import serve
from qurl_ray.serving.load import fingerprint_of, load_policy
from qurl_ray.serving.policies import Pinned, files_of, pin, tracking_uri
from qurl_ray.serving.prompts import chat_prompt_ids
from qurl_ray.serving.protocol import ApiError
from qurl_ray.types import Manifest, TensorRecord
from tests.mlflow_server import Server
from tests.serving.apps import save_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory, _quiet_machine):
    folder = tmp_path_factory.mktemp("runs")
    for at, name in enumerate(("first", "second"), start=1):
        run = save_run(folder, name, seed=at)
        os.utime(run / "summary.json", (at, at))
    (folder / "unfinished").mkdir()
    return folder


def pinned(runs, policy=None, **settings):
    return pin(ServingConfig(output_dir=runs, policy=policy, **settings))


def test_the_latest_finished_run_is_the_default(runs):
    assert pinned(runs).name == "second"
    assert pinned(runs).source == str(runs / "second" / "policy-int8")


@pytest.mark.parametrize(
    ("quantization", "folder"),
    [("auto", "policy-int8"), ("int8", "policy-int8"), ("none", "policy"), ("fp8", "policy")],
)
def test_a_run_gives_the_policy_in_the_format_asked_for(runs, quantization, folder):
    for policy in ("first", str(runs / "first")):
        assert pinned(runs, policy, quantization=quantization).source == str(runs / "first" / folder)


def test_a_models_folder_is_taken_as_it_is(runs):
    found = pinned(runs, str(runs / "first" / "policy"))
    assert (found.source, found.name) == (str(runs / "first" / "policy"), "first")


@pytest.fixture
def run(runs):
    """A run of its own, which a test may change."""
    yield shutil.copytree(runs / "first", runs / "changing")
    shutil.rmtree(runs / "changing")


def test_other_weights_in_the_same_folder_are_another_policy(runs, run):
    before = pinned(runs, "changing")
    weights = run / "policy-int8" / "model.safetensors"
    os.utime(weights)
    (run / "policy-int8" / ".DS_Store").touch()
    assert pinned(runs, "changing") == before, "the same weights"
    stat = weights.stat()
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert pinned(runs, "changing") != before
    assert pinned(runs, "changing").source == before.source


def test_files_that_are_not_those_that_were_chosen_are_refused_before_and_after_they_are_read(runs, run):
    before = pinned(runs, "changing")
    weights = run / "policy-int8" / "model.safetensors"
    config = ServingConfig()
    with files_of(before, config) as folder:
        assert folder == run / "policy-int8"
    for _ in range(2):  # while it is read, and before
        with pytest.raises(ConfigError, match=r"have changed since .* was chosen"), files_of(before, config):
            weights.write_bytes(weights.read_bytes()[:-1] + b"!")


@pytest.mark.parametrize(
    "policy", ["nothing", "unfinished", "/no/such/folder", "models:/nothing/1", "models:/nothing/latest", "models:/x@y"]
)
def test_what_is_not_there_is_named(runs, policy):
    with pytest.raises(ConfigError, match=r"nothing|unfinished|/no/such/folder|models:/"):
        pinned(runs, policy)


def test_no_run_is_an_error_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"no run in .* has finished: set policy, or output_dir"):
        pinned(tmp_path)


NOT_FINISHED = [
    b"[]", b"3", b"null", b"{", b"", b"\xff", b"[" * 100_000, b"{}", b'{"steps": 3}',
    b'{"steps": 3, "interrupted": null}', b'{"steps": null, "interrupted": false}',
    b'{"steps": 3, "interrupted": true}',
]  # fmt: skip


@pytest.mark.parametrize("content", NOT_FINISHED)
def test_a_summary_that_does_not_say_that_the_run_finished_does_not_count(tmp_path, content):
    for name in ("a", "b"):
        (tmp_path / name / "policy").mkdir(parents=True)
        (tmp_path / name / "policy" / "config.json").write_text("{}")
        (tmp_path / name / "summary.json").write_text('{"steps": 3, "interrupted": false}')
        os.utime(tmp_path / name / "summary.json", (1, 1))
    (tmp_path / "b" / "summary.json").write_bytes(content)
    assert pinned(tmp_path).name == "a"
    (tmp_path / "a" / "summary.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"no run in .* has finished"):
        pinned(tmp_path)
    (tmp_path / "a" / "summary.json").unlink()
    (tmp_path / "a" / "summary.json").mkdir()
    with pytest.raises(ConfigError, match=r"a/summary\.json cannot be read: Is a directory"):
        pinned(tmp_path)


@pytest.mark.parametrize(
    "uri", ["http://me:sesame@nosuchhost.invalid:5000", "http://me:sesame@127.0.0.1:9", "weird://me:sesame@host"]
)
def test_an_mlflow_that_cannot_be_reached_is_named_soon_and_without_its_password(runs, uri):
    for policy in ("models:/x/1", "models:/x/latest", "models:/x@y"):  # MLflow itself tries each for minutes
        with pytest.raises(ConfigError) as caught:
            pinned(runs, policy, mlflow_uri=uri)
        assert str(caught.value).startswith(f"cannot find {policy} in MLflow at {uri.replace('me:sesame', '…')}: ")
        assert "sesame" not in str(caught.value)
    registered = files_of(Pinned(source="models:/x/1", name="x"), ServingConfig(mlflow_uri=uri))
    with pytest.raises(ConfigError, match="cannot fetch models:/x/1 from MLflow at") as caught, registered:
        pytest.fail("it was fetched")
    assert "sesame" not in str(caught.value)


def test_replicas_get_the_whole_address_and_a_dry_run_shows_none_of_its_password(runs):
    from qurl_ray.serving.deploy import application

    config = ServingConfig(output_dir=runs, policy="first", mlflow_uri="http://me:sesame@host")
    (settings,) = application(config, pin(config), name="x")._bound_deployment.init_args
    assert ServingConfig.model_validate(settings).mlflow_uri == "http://me:sesame@host"
    done = CliRunner().invoke(
        serving_app(serve), ["--dry-run", f"policy={runs / 'first'}", "mlflow_uri=http://me:sesame@host"]
    )
    assert "mlflow_uri: http://…@host\n" in done.stdout
    assert "sesame" not in done.output


def test_a_registered_model_is_pinned_to_its_version_and_fetched(runs):
    from mlflow.tracking import MlflowClient

    uri = tracking_uri(ServingConfig(output_dir=runs))
    client = MlflowClient(uri, registry_uri=uri)
    client.create_registered_model("qurl-ray-first")
    for name in ("first", "second"):
        client.create_model_version("qurl-ray-first", (runs / name / "policy").as_uri())
    client.set_registered_model_alias("qurl-ray-first", "champion", "1")
    latest = pinned(runs, "models:/qurl-ray-first/latest")
    assert (latest.source, latest.name) == ("models:/qurl-ray-first/2", "qurl-ray-first")
    assert pinned(runs, "models:/qurl-ray-first@champion").source == "models:/qurl-ray-first/1"
    assert latest == replace(pinned(runs, "second", quantization="none"), source=latest.source, name=latest.name)


@pytest.fixture(params=["database", pytest.param("server", marks=pytest.mark.slow)])
def mlflow_uri(request, tmp_path):
    if request.param == "database":
        yield f"sqlite:///{tmp_path}/mlflow.db"
        return
    server = Server(tmp_path)
    server.start()
    yield server.uri
    server.kill()


def test_a_version_is_downloaded_where_it_is_loaded(runs, tmp_path, mlflow_uri):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(mlflow_uri, registry_uri=mlflow_uri)
    place = None if mlflow_uri.startswith("http") else (tmp_path / "artifacts").as_uri()
    run_id = client.create_run(client.create_experiment("sums", place)).info.run_id
    client.log_artifacts(run_id, str(runs / "first" / "policy-int8"), "policy")
    client.create_registered_model("sums")
    artifact = f"runs:/{run_id}/policy" if place else f"{client.get_run(run_id).info.artifact_uri}/policy"
    client.create_model_version("sums", artifact, run_id=run_id)
    config = ServingConfig(output_dir=runs, policy="models:/sums/latest", mlflow_uri=mlflow_uri)
    chosen = pin(config)
    assert chosen == Pinned(source="models:/sums/1", name="sums")
    weights = (runs / "first" / "policy-int8" / "model.safetensors").read_bytes()
    with files_of(chosen, config) as folder:
        assert (folder / "model.safetensors").read_bytes() == weights
    assert not folder.exists()


# --- loading -------------------------------------------------------------------------------------------------------


def test_policies_and_formats_have_fingerprints_of_their_own(runs):
    found = {}
    for name in ("first", "second"):
        for folder, quantization in (("policy", "auto"), ("policy", "int8"), ("policy-int8", "auto")):
            config = ServingConfig(quantization=quantization, slots=1)
            loaded = load_policy(runs / name / folder, config)
            found[name, folder, quantization] = loaded.fingerprint
            assert bool(loaded.engine.kernels()) == (quantization == "int8" or folder == "policy-int8")
    assert len(set(found.values())) == 4
    assert found["first", "policy", "int8"] == found["first", "policy-int8", "auto"], "the same codes"
    with pytest.raises(ConfigError, match="holds int8 codes: it cannot be used in fp8"):
        load_policy(runs / "first" / "policy-int8", ServingConfig(quantization="fp8"))


def test_a_served_policy_ends_answers_at_every_token_that_its_files_list(runs, tmp_path):
    for name in ("policy", "policy-int8"):
        folder = shutil.copytree(runs / "first" / name, tmp_path / name)
        (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5, 7]}')
        assert load_policy(folder, ServingConfig(slots=1)).stop_ids == (1, 5, 7)


def test_a_fingerprint_is_of_every_tensor():
    def manifest(*fingerprints):
        tensors = tuple(
            TensorRecord(name=f"t{i}", shape=(1,), format="none", fingerprint=one, bytes=4)
            for i, one in enumerate(fingerprints)
        )
        return Manifest(version=1, precision="none", weight_max_code=0, tensors=tensors)

    assert fingerprint_of(manifest(1, 2)) != fingerprint_of(manifest(2, 1))
    assert fingerprint_of(manifest(1, 2)) == fingerprint_of(manifest(1, 2))


# --- prompts -------------------------------------------------------------------------------------------------------


def test_messages_without_a_chat_template_are_what_they_say(tokenizer):
    messages = [{"role": "user", "content": "12+"}, {"role": "user", "content": "34="}]
    assert tokenizer.decode(chat_prompt_ids(messages[:1], tokenizer)) == "12+"
    both = chat_prompt_ids(messages, tokenizer, template="0{prompt}1")
    assert tokenizer.decode(both, skip_special_tokens=True) == "012+34=1"


def test_a_chat_template_may_refuse_messages(tokenizer):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ApiError, match="the chat template refuses the messages: roles must alternate") as caught:
        chat_prompt_ids([{"role": "user", "content": "1"}], strict)
    assert caught.value.status == 400
    strict.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    assert tokenizer.decode(chat_prompt_ids([{"role": "user", "content": "1+2"}], strict)) == "1+2="


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["slotz=3"], "unknown key 'slotz'; did you mean 'slots'?"),
        (["slots=many"], "slots: "),
        (["max_choices=200"], "could never be accepted"),
        (["replicas=3", "max_replicas=2"], "max_replicas (2) is below replicas (3)"),
        (["template=hello"], "template must contain {prompt}"),
        (["policy"], "not of the form key=value"),
    ],
)
def test_wrong_settings_are_one_clear_line(settings, message):
    done = CliRunner().invoke(serving_app(serve), settings)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["policy=first", "output_dir=s3://b/x"], "output_dir=s3:/b/x is a URL"),
        (["policy=nosuch"], "nosuch is neither the folder of a model nor that of a run"),
        (["policy=first", "host=0.0.0.0"], "set an API key in"),
        (["policy=first", "mlflow_uri=nosuchhost"], "is no address"),
    ],
)
def test_a_dry_run_ends_in_the_error_of_the_start(runs, monkeypatch, settings, message):
    monkeypatch.delenv("QURL_API_KEY", raising=False)
    done = CliRunner().invoke(serving_app(serve), ["--dry-run", f"output_dir={runs}", *settings])
    assert (done.exit_code, message in done.stderr) == (2, True), done.output


def test_a_dry_run_prints_the_settings_and_help_explains_them(runs, tmp_path):
    done = CliRunner().invoke(serving_app(serve), ["--dry-run", "slots=7", f"output_dir={runs}", "policy=first"])
    assert done.exit_code == 0
    assert "slots: 7\n" in done.stdout
    assert done.stdout.endswith(f"# checked: settings; host and key; the policy {pinned(runs, 'first').source}\n")
    asked = "models:/nosuch/1"
    done = CliRunner().invoke(serving_app(serve), ["--dry-run", f"output_dir={tmp_path}", f"policy={asked}"])
    assert done.stdout.endswith(f"# not checked: the policy, as MLflow would be asked for {asked}\n")
    assert not any(tmp_path.iterdir())
    shown = " ".join(CliRunner().invoke(serving_app(serve), ["--help", "slots"]).stdout.split())
    assert "slots = 32 Answers that a replica generates at a time" in shown


def test_strangers_need_a_key_or_an_open_door():
    for host in ("0.0.0.0", "'::'", "192.168.0.4", "example.org"):
        with pytest.raises(ConfigError, match="set an API key in"):
            load_serving(None, [f"host={host}"]).check_host(key=False)
        load_serving(None, [f"host={host}"]).check_host(key=True)
        load_serving(None, [f"host={host}", "open=true"]).check_host(key=False)
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        load_serving(None, [f"host={host}"]).check_host(key=False)


@pytest.mark.parametrize(("held", "key"), [("sk-1", "sk-1"), ("sk-1\n", "sk-1"), (" sk-1\r\n", "sk-1"), ("", None)])
def test_a_key_is_what_a_client_can_send(monkeypatch, held, key):
    monkeypatch.setenv("QURL_API_KEY", held)
    assert api_key(ServingConfig()) == key


@pytest.mark.parametrize("held", ["\n", "two words", "schlüssel", "a\nb", "a\x7f"])
def test_a_key_that_no_client_can_send_is_refused(monkeypatch, held):
    monkeypatch.setenv("QURL_API_KEY", held)
    with pytest.raises(ConfigError, match=r"\$QURL_API_KEY must be of visible ASCII characters"):
        api_key(ServingConfig())
