"""qurl compare as a user types it."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from qurl_ray.cli import compare as job
from qurl_ray.config import load_config
from tests.report.test_compare import a_run, whole

ROOT = Path(__file__).parents[2]


def invoke(*arguments: object):
    app = typer.Typer()
    app.command()(job.main)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path) -> Path:
    a_run(tmp_path / "one", whole(after="1110"), summary={})
    a_run(tmp_path / "two", whole(after="1111"), summary={})
    return tmp_path


def test_the_command_of_the_readme_prints_a_table_and_writes_a_page(folder):
    command = [sys.executable, "jobs/compare.py", "--runs", "one", "two", "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(folder / "compare.html")
    assert "after, full" in done.stdout
    assert "<h1>Comparison of runs</h1>" in (folder / "compare.html").read_text()


def test_without_runs_the_newest_are_compared_and_out_says_where_to(folder, tmp_path):
    done = invoke("--folder", folder, "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert {"one", "two"} <= set(done.stdout.split())
    assert (tmp_path / "page.html").is_file()


def test_a_folder_of_runs_that_is_not_there_yet_is_made_for_the_page(folder, tmp_path):
    done = invoke(folder / "one", folder / "two", "--folder", tmp_path / "none")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "none" / "compare.html").is_file()


def test_the_difference_is_that_of_the_statistics():
    found = job.difference([True, False, False, True] * 50, [True, True, False, True] * 50)
    assert found.value == 0.25
    assert 0.18 < found.low < 0.25 < found.high < 0.32
    assert found.p_value == 2 / 2**50


def test_the_difference_of_graded_rewards_is_that_of_their_means():
    found = job.difference([0.25, 0.5, 0.5, 0.0, 0.125], [0.5, 0.75, 0.75, 0.25, 0.375])
    assert (found.value, found.low, found.high) == (0.25, 0.25, 0.25)
    assert found.p_value == 2 / 2**5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tow", "one"], "did you mean 'two'?"),
        (["one"], "one run, one, is not enough to compare; the same with full-precision rollouts is made by"),
        (["one", "two", "--experiment", "x"], "not both"),
        (["--experiment", "x"], "no MLflow database"),
        (["--experiment", "x", "--uri", "nosuchhost"], "the URI of MLflow is no address"),
        (["one", "two", "--out", "/no/such/folder/page.html"], "cannot read or write"),
    ],
)
def test_errors_are_one_line(folder, arguments, message):
    done = invoke(*arguments, "--folder", folder)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "settings", "other"),
    [
        ("quickstart", [], "none"),
        ("quickstart_full", [], "int8"),
        ("jet_rl", [], "none"),
        ("quickstart", ["rollout.max_staleness=1"], "none"),
        ("quickstart", ["algorithm.correction=naive", "algorithm.calibrate_every=5"], "none"),
    ],
)
def test_after_one_run_it_says_how_to_make_the_second(tmp_path, config, settings, other):
    assert "there are no runs in" in invoke("--folder", tmp_path).stderr
    settings = load_config(config, ["name=mine", *settings])
    a_run(tmp_path / "mine", whole(after="1110"), summary={}, **settings.model_dump(mode="json"))
    said = invoke("--folder", tmp_path).stderr
    command = said.split("`")[1]
    assert command.startswith(f"qurl train {tmp_path}/mine/config.yaml name=mine_")
    done = subprocess.run(
        [sys.executable, "-c", "from qurl_ray.cli.main import main; main()", *command.split()[1:], "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"quantization: {other}" in done.stdout


def test_a_url_is_no_folder_of_runs(monkeypatch):
    for settings, variable in ((["--folder", "s3://b/x"], ""), ([], "s3://b/x")):
        monkeypatch.setenv("QURL_RUNS", variable)
        done = invoke(*settings)
        assert (done.exit_code, done.stderr.startswith("error: output_dir=s3:/")) == (2, True), done.output
