"""The command `qurl`, as a user types it."""

import subprocess
import sys
from importlib import metadata

import pytest
import yaml
from typer.testing import CliRunner

from qurl_ray import __version__
from qurl_ray.cli import doctor
from qurl_ray.cli.main import app, completed, shipped
from qurl_ray.config import load_config
from qurl_ray.config.load import SHIPPED
from tests.quant.test_kernel_table import gpu

COMMANDS = {"train", "configs", "evaluate", "report", "compare", "serve", "plan", "track", "doctor"}


def qurl(*arguments: object, columns: int = 80):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [str(argument) for argument in arguments])


def test_help_lists_the_commands_and_fits_a_terminal():
    for flag in ("--help", "-h"):
        shown = qurl(flag).stdout
        assert {
            line.split()[0] for line in shown.partition("Commands:")[2].splitlines() if line.startswith("  ")
        } >= COMMANDS
        assert max(map(len, shown.splitlines())) <= 80
    assert qurl("--version").stdout == f"qurl-ray {__version__}\n"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_has_help_that_fits_a_terminal(command):
    done = qurl(command, "--help")
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_no_help_waits_for_torch_or_ray():
    code = "import sys, qurl_ray.cli.main; print({'torch', 'ray', 'transformers', 'mlflow'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_the_settings_files_of_the_package_are_listed_printed_and_trained_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = [line.split()[0] for line in qurl("configs").stdout.splitlines()]
    assert listed == sorted(path.stem for path in SHIPPED.glob("*.yaml"))
    assert all(shipped().values())
    text = qurl("configs", "quickstart").stdout
    (tmp_path / "mine.yaml").write_text(text)
    assert load_config(tmp_path / "mine.yaml") == load_config(SHIPPED / "quickstart.yaml")
    assert "there are acr_demo, bench_step" in qurl("configs", "quikstart").stderr
    for name in ("quickstart", "mine.yaml"):
        done = qurl("train", name, "--dry-run", f"output_dir={tmp_path}/runs", "steps=7")
        assert done.exit_code == 0, done.output
        assert yaml.safe_load(done.stdout)["steps"] == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a YAML file, a name that `qurl configs` lists, or settings"),
        (["stepps=3"], "unknown key 'stepps'; did you mean 'steps'?"),
        (["model.type=pretrained", "model.path=/nope"], "no such folder: /nope"),
        (["quikstart"], "config file quikstart does not exist; did you mean quickstart?"),
        (["quickstart", "stepps=3"], "unknown key 'stepps'; did you mean 'steps'?"),
        (["quickstart", "--extend", "--dry-run"], "holds no checkpoint from which a run could be extended"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = qurl("train", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_help_of_train_shows_the_settings_that_are_named():
    assert "\n\nrollout.slots = " in qurl("train", "--help", "rollout").stdout
    with_file = qurl("train", "quickstart", "--help", "rollout.slots").stdout
    assert with_file.startswith("rollout.slots = ")
    page = qurl("train", "--help").stdout
    assert page.startswith("Train.\n\nExample: qurl train quickstart steps=20\n\nUsage: ")


def test_shells_complete_names_of_files_and_settings():
    assert dict(completed("quick")) == {name: about for name, about in shipped().items() if name.startswith("quick")}
    assert [text for text, _ in completed("learner.sch")] == ["learner.schedule="]
    assert all(about for _, about in completed("rollout."))


# --- doctor --------------------------------------------------------------------------------------------------------


def test_the_doctor_says_what_is_here_and_what_would_be_refused():
    done = qurl("doctor")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    found = {line[0]: line[1:] for line in lines if len(line) > 1}
    assert found["torch"] == [metadata.version("torch")]
    assert found["ray"] == [metadata.version("ray")]
    assert "kernel" in found["int8"]  # int8 on cpu
    assert "rollout.device=cuda and learner.device=cuda would be refused" in done.stdout
    assert "equal bits of engine and learner" in done.stdout
    assert done.stdout.endswith("0 problems that would stop any run\n")


def test_the_doctor_says_what_computes_gradients_and_why(monkeypatch):
    gpu(monkeypatch, (9, 0))
    found = {finding.what: finding.found for finding in doctor.computing()}
    assert found["fp8_block on cuda"] == "kernel scaled_mm_block"
    assert found["gradients in fp8_block"] == "scaled_mm"
    gpu(monkeypatch, (9, 0), cuda="12.8")
    found = {finding.what: finding.found for finding in doctor.computing()}
    assert found["gradients in fp8_block"].startswith("emulation: scaled_mm_block needs a torch for CUDA 12.9")


def test_a_version_that_does_not_fit_stops_all_runs(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.0" if name == "torch" else real(name))
    (finding,) = (finding for finding in doctor.software() if finding.what == "torch")
    assert finding.fatal
    assert "this version of qurl-ray is made for torch<2.14,>=2.11" in finding.problem

    def without_ray(name):
        if name == "ray":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", without_ray)
    (finding,) = (finding for finding in doctor.software() if finding.what == "ray")
    assert (finding.found, finding.fatal) == ("missing", True)


@pytest.mark.parametrize(
    ("variables", "what", "problem"),
    [
        ({"QURL_RUNS": "/proc/runs"}, "runs", "in /proc; set $QURL_RUNS"),
        ({"QURL_CACHE": "/proc/cache"}, "cache", "in /proc; set $QURL_CACHE"),
        ({"HOME": "/proc/home", "QURL_CACHE": ""}, "cache", "in /proc; set $QURL_CACHE"),
        ({"TMPDIR": "/tmp/" + 110 * "x"}, "Ray", "bytes longer than the system takes; set $RAY_TMPDIR or $TMPDIR"),
        ({"TMPDIR": "/proc/x"}, "Ray", "in /proc; set $RAY_TMPDIR or $TMPDIR"),
        ({"RAY_TMPDIR": "/proc/x"}, "Ray", "in /proc; set $RAY_TMPDIR or $TMPDIR"),
    ],
)
def test_a_folder_that_cannot_be_used_is_told(variables, what, problem, monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (finding,) = (finding for finding in doctor.places() if finding.what == what)
    assert finding.fatal
    assert problem in finding.problem
    assert "\n" not in finding.problem


def test_an_address_of_mlflow_that_is_none_is_told(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense")
    assert any(finding.fatal and "MLFLOW_TRACKING_URI" in finding.problem for finding in doctor.places())
