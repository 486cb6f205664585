"""Paths in settings: absolute where the settings are read, for processes in other folders."""

import pytest
from typer.testing import CliRunner

from qurl_ray.cache import cache_root
from qurl_ray.cli.main import app
from qurl_ray.config import load_config, resolve
from qurl_ray.config.paths import absolute, absolute_address, is_path
from qurl_ray.config.serving import load_serving, resolve_serving


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in, with a model and two files of problems, one a link as in the cache of the hub."""
    for folder in ("work/pol", "home", "blobs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "work" / "sums.jsonl").touch()
    (tmp_path / "blobs" / "0123").touch()
    (tmp_path / "home" / "x.jsonl").symlink_to(tmp_path / "blobs" / "0123")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_paths_that_exist_become_absolute_and_names_stay(here):
    for path in ("pol", "./pol/", "../work/pol", str(here / "work" / "pol")):
        assert absolute(path) == str(here / "work" / "pol")
    assert absolute("~/x.jsonl") == str(here / "home" / "x.jsonl")
    for name in ("org/name", "no.jsonl", "~nosuchuser/x", "x" * 5000, "models:/pol/1"):
        assert absolute(name) == name


@pytest.mark.parametrize(
    "command",
    [
        ["train", "quickstart", "--dry-run", "output_dir=~nosuchuser/x"],
        ["compare", "~nosuchuser/x"],
        ["report", "~nosuchuser/x"],
        ["evaluate", "~nosuchuser/x"],
        ["serve", "policy=~nosuchuser/x"],
        ["plan", "--model", "~nosuchuser/x"],
    ],
)
def test_the_home_of_an_unknown_user_is_an_error(here, command):
    result = CliRunner().invoke(app, command)
    assert "~nosuchuser/x: no home folder for ~nosuchuser" in f"{result.output}{result.exception}"


def test_ids_of_the_hub_are_no_paths():
    for text in ("/nope", "./nope", "../nope", "~", "~/nope", "~user/nope", "a/b/c", "runs/quickstart/policy"):
        assert is_path(text)
    for text in ("gpt2", "Qwen/Qwen3-0.6B", "openai/gsm8k"):
        assert not is_path(text)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("sqlite:///mlflow.db", "sqlite:///{here}/work/mlflow.db"),
        ("sqlite:///../mlflow.db?timeout=5", "sqlite:///{here}/mlflow.db?timeout=5"),
        ("sqlite+pysqlite:///~/mlflow.db", "sqlite+pysqlite:///{here}/home/mlflow.db"),
        ("./mlruns", "{here}/work/mlruns"),
        ("file:./mlruns", "file:{here}/work/mlruns"),
    ],
)
def test_files_of_mlflow_become_absolute(here, uri, expected):
    assert absolute_address(uri) == expected.format(here=here)
    assert absolute_address(absolute_address(uri)) == absolute_address(uri)


@pytest.mark.parametrize(
    "uri", ["sqlite:////x/m.db", "sqlite:///:memory:", "http://host/x", "databricks", "file:///x", "postgresql://db/x"]
)
def test_other_addresses_of_mlflow_stay(uri):
    assert absolute_address(uri) == uri


def test_the_settings_of_a_run_are_resolved(here):
    given = ["model.type=pretrained", "model.path=pol", "task.type=dataset", "task.path=sums.jsonl"]
    given += ["task.held_out_path=~/x.jsonl", "tracking.mlflow_uri=sqlite:///mlflow.db", "output_dir=runs"]
    config = resolve(load_config(None, given), submitted=False)
    assert config.model.path == str(here / "work" / "pol")
    assert (config.task.path, config.task.held_out_path) == (f"{here}/work/sums.jsonl", f"{here}/home/x.jsonl")
    assert config.tracking.mlflow_uri == f"sqlite:///{here}/work/mlflow.db"
    assert config.output_dir == here / "work" / "runs"
    hub = ["model.type=pretrained", "model.path=org/name", "task.type=dataset", "task.path=openai/gsm8k"]
    config = resolve(load_config(None, hub), submitted=False)
    assert (config.model.path, config.task.path, config.task.held_out_path) == ("org/name", "openai/gsm8k", None)


def test_the_settings_of_serving_are_resolved(here, monkeypatch):
    config = resolve_serving(load_serving(None, ["policy=pol", "output_dir=runs", "mlflow_uri=sqlite:///m.db"]))
    expected = (str(here / "work" / "pol"), here / "work" / "runs", f"sqlite:///{here}/work/m.db")
    assert (config.policy, config.output_dir, config.mlflow_uri) == expected
    assert resolve_serving(load_serving(None, ["policy=models:/pol/1"])).policy == "models:/pol/1"
    assert resolve_serving(load_serving(None)).policy is None


def test_the_cache_is_where_this_process_began(here, monkeypatch):
    monkeypatch.setenv("QURL_CACHE", "cache")
    assert cache_root() == here / "work" / "cache"
    monkeypatch.setenv("QURL_CACHE", "~/cache")
    assert cache_root() == here / "home" / "cache"
