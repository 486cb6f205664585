"""The commands as a user types them."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from qurl_ray.config.cli import training_app
from qurl_ray.config.model import TinyModel
from qurl_ray.policy.tiny import cached_tiny_policy
from qurl_ray.training.driver.job import run_job
from tests.conftest import SUMS

ROOT = Path(__file__).parents[2]


def job(name: str, *arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "jobs" / name), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["qurl_dapo.py", "qurl_grpo.py", "qurl_ppo.py", "jet_rl.py", "serve.py"])
def test_help_begins_with_what_the_job_does_and_an_example_and_shows_what_is_named(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    docstring = ast.get_docstring(ast.parse((ROOT / "jobs" / name).read_text())) or ""
    sentence, _, example = docstring.partition(": ")
    shown = job(name, "--help").stdout
    assert shown.startswith(f"{sentence}.\n\nExample: {example}\n\nUsage: {name} [OPTIONS] ")
    assert example.startswith(f"python jobs/{name} ")
    assert max(map(len, shown.splitlines())) <= 80
    setting = "slots" if name == "serve.py" else "rollout.slots"
    assert f"\n\n{setting} = " in job(name, "-h", "all").stdout
    wrong = job(name, "--help", f"{setting}_")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert f"did you mean '{setting}'" in wrong.stderr


def test_errors_have_no_traceback():
    done = job("qurl_grpo.py", "learner.lr=fast")
    assert done.returncode == 2
    assert done.stderr.startswith("error: settings: learner.lr: ")
    assert "Traceback" not in done.stderr


def test_dry_run_prints_the_resolved_settings_and_what_it_checked_and_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("QURL_CACHE", str(tmp_path / "cache"))
    done = job(
        "qurl_dapo.py", "--config", "qurl_ray/configs/quickstart.yaml", "--dry-run", f"output_dir={tmp_path / 'runs'}",
        "seed=7", "learner.zero_stage=3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "note: learner.zero_stage=3 has no effect with learner.backend=torch, which shards nothing; remove it or "
        "choose deepspeed\n"
    )
    settings = yaml.safe_load(done.stdout)
    assert settings["seed"] == 7
    assert settings["algorithm"]["clip_high"] == 0.28  # a default, not in the file
    said = done.stdout.splitlines()
    placement, invariance, *example = said[said.index("# checked:") - 5 : said.index("# checked:")]
    assert placement.startswith("# placement: 1 learner rank")
    assert invariance.startswith("# equal bits of engine and learner")
    assert example[0].startswith("# the prompt of train-0 as the policy reads it")
    assert f"#   the folder {tmp_path}/runs/quickstart (new)" in said
    assert said[-2] == "# not checked:"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout.quantisation=int8"], "unknown key 'rollout.quantisation'; did you mean 'rollout.quantization'?"),
        (["--config", "qurl_ray/configs/quikstart.yaml"], "did you mean qurl_ray/configs/quickstart.yaml?"),
        (["--config", "quickstart_grpo"], "run it with `qurl train`, or jobs/qurl_grpo.py"),
        (["rollout.samples_per_prompt=1"], "a group of one has no advantage"),
        (["model.type=pretrained", "model.path=/no/such/folder"], "no such folder: /no/such/folder"),
        (["rollout.max_new_tokens=80"], "exceeds the context 64"),
        (["task.type=dataset", "task.path=/no/such.jsonl"], "/no/such.jsonl"),
        (["task.reward=math:no_such"], "no_such"),
        (["rollout.quantization=int4", "model.intermediate_size=200"], "width 200"),
    ],
)
def test_bad_input_is_one_clear_line_within_seconds(tmp_path, arguments, message):
    plain = [] if "model.type=pretrained" in arguments else ["model.cold_start=false"]
    done = CliRunner().invoke(
        training_app("dapo", run_job), [*arguments, *plain, f"output_dir={tmp_path}", "tracking.mlflow=false"]
    )
    assert done.exit_code == 2, done.output
    assert message in done.stderr


@pytest.mark.slow
def test_jet_rl_takes_any_algorithm_in_a_unified_flow(tmp_path):
    for overrides in ([], ["algorithm.type=grpo"]):
        done = job("jet_rl.py", "--dry-run", f"output_dir={tmp_path}", *overrides)
        assert done.returncode == 0, done.stderr
        settings = yaml.safe_load(done.stdout)
        assert (settings["precision_flow"], settings["rollout"]["quantization"]) == ("unified", "fp8_block")
        assert settings["algorithm"]["type"] == ("grpo" if overrides else "dapo")
    done = job("jet_rl.py", "--config", "qurl_ray/configs/quickstart.yaml")
    assert done.returncode == 2
    assert "precision_flow is rollout_only; run it with `qurl train`, or jobs/qurl_dapo.py" in done.stderr


@pytest.mark.slow
def test_evaluate_reports_accuracy_and_samples_with_intervals(tmp_path):
    settings = {"model": {"cold_start": False}, "rollout": {"max_new_tokens": 4}, "evaluation": {"problems": 70}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    policy = cached_tiny_policy(TinyModel(cold_start=False, layers=1), SUMS, lambda *_: None)
    out = tmp_path / "figures.json"
    done = job("evaluate.py", tmp_path, "--policy", policy, "--samples", 4, "--quantization", "int8", "--out", out)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert figures["accuracy"]["n"] == 70
    assert 0 <= figures["avg_at_k"]["value"] <= figures["pass_at_k"]["value"] <= 1
    assert figures["failed_rewards"] == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["solved", "avg@4", "pass@4"]
    nothing = job("evaluate.py", tmp_path)
    assert nothing.returncode == 2
    assert "holds no policy" in nothing.stderr
