"""The documentation: links lead somewhere, settings, metrics and messages exist, and commands run.

Each command in the shell blocks of README.md, docs/quickstart.md and docs/own-task.md is either run here (training with
settings that make it small), or says that it needs a GPU or a cluster, or is in ELSEWHERE with the test that runs the
same.
"""

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
import ray
import yaml
from click.testing import CliRunner

from qurl_ray.cli.main import main as qurl
from qurl_ray.config import RunConfig, load_config
from qurl_ray.config.load import describe
from tests.training.runs import ROOT, SMALL

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
"""With internal links."""
NOW = [page for page in PAGES if page.name not in ("CHANGELOG.md", "LOG.md")]
"""These say what is there, the others what was."""
WITH_COMMANDS = [ROOT / "README.md", ROOT / "docs" / "quickstart.md", ROOT / "docs" / "own-task.md"]

ELSEWHERE = {
    "make test": ".ci/run",
    "make serve": "tests/serving/test_app.py::test_a_chat_is_answered_with_what_the_engine_draws_alone",
    "make smollm2": "tests/policy/test_gguf.py::test_it_knows_english_and_engine_and_learner_agree_to_the_bit",
}
"""What is too long to be run here: by command, what of CI runs the same."""

NEEDS = re.compile(r"#.*\bneeds (a |\d+ )?(GPUs?|cluster)\b")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TRAINING = re.compile(r"jobs/(qurl_\w+|jet_rl)\.py|/qurl train ")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> str:
    """Without blocks of code."""
    return FENCE.sub("", page.read_text())


# --- what has run --------------------------------------------------------------------------------------------------

NO_GPU = re.compile(
    r"no GPU has run|no (whole )?run was made on a GPU|(not|nothing) (here )?(was )?measured on (a )?GPU", re.I
)


@pytest.mark.parametrize("folder", ["docs", "qurl_ray"])
def test_no_text_denies_the_runs_on_an_h200(folder):
    texts = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py") and path.name != "LOG.md"]
    found = {name_of(path): m[0] for path in texts for m in [NO_GPU.search(" ".join(path.read_text().split()))] if m}
    assert not found


# --- rules for tests -----------------------------------------------------------------------------------------------


def test_no_example_of_hypothesis_has_a_deadline():
    assert hypothesis.settings().deadline is None
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)}
    assert not [name_of(path) for path, text in texts.items() if re.search(r"\bdeadline=(?!None)[^)]*\)\n@given", text)]


# --- links ---------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(next(s for s in (slug, *(f"{slug}-{n}" for n in range(1, 99))) if s not in found))
    return found


def links(page: Path) -> set[str]:
    """Targets within the repository."""
    text = re.sub(r"`[^`]*`", "", prose(page))
    found = set(re.findall(r"\]\(([^)\s]+)\)", text))
    return {target for target in found if not re.match(r"[a-z]+:", target)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_are_there(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(file), f"{target}: no such heading"


def test_the_readme_links_every_page_and_fits_two_screens():
    readme = ROOT / "README.md"
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in links(readme)}
    assert set((ROOT / "docs").glob("*.md")) <= linked
    lines = readme.read_text().splitlines()
    assert len(lines) <= 100
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


# --- what is named -------------------------------------------------------------------------------------------------


def inline(page: Path) -> Iterator[str]:
    """The words of inline code."""
    for span in re.findall(r"`([^`]+)`", prose(page)):
        yield from span.split()


@pytest.mark.parametrize("page", NOW, ids=name_of)
def test_settings_that_are_named_exist(page):
    known = {name for key, _, _ in describe() for name in (key.partition(".type=")[0], key.partition("=")[0])}
    sections = "|".join(field for field in RunConfig.model_fields if any(key.startswith(f"{field}.") for key in known))
    for word in inline(page):
        if (found := re.fullmatch(rf"((?:{sections})\.[a-z_.]+[a-z_])(=\S*)?,?", word)) and not word.endswith(".py"):
            assert found[1] in known, f"{word}: no such setting"


def test_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in NOW:
        named = re.findall(r"(?:^|`)make ([a-z][\w-]*)", page.read_text(), re.MULTILINE)
        assert set(named) <= targets, page


def templates() -> Iterator[str]:
    """Texts in the package, with … for what is filled in."""
    for path in (ROOT / "qurl_ray").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.parametrize("page", ["troubleshooting.md", "bugs-of-2026.md"])
def test_messages_that_are_quoted_are_those_of_the_package(page):
    text = " ".join((ROOT / "docs" / page).read_text().split())
    quoted = re.findall(r'"`([^`]+)`"', text)
    assert len(quoted) > 15
    known = list(templates())
    assert [message for message in quoted if not any(message in one for one in known)] == []


def test_tests_that_are_named_exist():
    named = {found for page in NOW for found in re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", page.read_text())}
    assert len(named) > 60
    assert [name for name in sorted(named) if f"\ndef {name[1]}(" not in (ROOT / name[0]).read_text()] == []


def test_each_bug_of_the_year_has_its_thread_and_a_test():
    text = (ROOT / "docs" / "bugs-of-2026.md").read_text()
    threads = re.findall(r"\*\*\[[\w-]+ #(\d+)\]\((https://github\.com/[\w-]+/[\w-]+/(?:issues|pull)/\1)\)\*\*", text)
    assert len(threads) == len({address for _, address in threads}) == text.count("**[")
    assert f"reported these {len(threads)} faults" in text
    entries = re.findall(r"^- \*\*\[.*?(?=^- |^\n|\Z)", text, re.MULTILINE | re.DOTALL)
    assert [entry for entry in entries if not re.search(r"\n  \*Here:\* (.|\n)*\n  Tests?: `tests/", entry)] == []


# --- commands ------------------------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """(command, its comment) of the shell blocks; blocks and lines that need more than this machine are left out."""
    for kind, block in FENCE.findall(page.read_text()):
        assert kind, f"{page}: say what kind of text a block holds"
        if kind != "sh" or NEEDS.match(block):
            continue
        for line in block.splitlines():
            command, _, comment = line.partition(" #")
            if command.strip() and not NEEDS.search(f"#{comment}"):
                yield command.strip(), comment


ALL = list(dict.fromkeys(command for page in WITH_COMMANDS for command, _ in commands(page)))
"""Each once, in their order."""
TRAINS = [c for c in ALL if TRAINING.search(c) and not {"--dry-run", "--help"} & set(shlex.split(c))]
QUICK = [c for c in ALL if c.startswith((".venv/bin/python ", ".venv/bin/qurl ")) and c not in TRAINS]


def test_every_command_is_run_here_or_elsewhere():
    others = set(ALL) - set(TRAINS) - set(QUICK)
    assert others == {"make quickstart", ".venv/bin/mlflow ui --backend-store-uri sqlite:///runs/mlflow.db", *ELSEWHERE}
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        assert not test or f"\ndef {test}(" in (ROOT / file).read_text()
    assert "make lint test" in (ROOT / ".ci" / "run").read_text()


def of_make(target: str) -> str:
    """What `make target` runs, once all is installed."""
    # As by itself, also when `make test` runs this.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    asked = ["make", "--dry-run", target]
    shown = subprocess.run(asked, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout
    return shown.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["smollm2", "serve"])
def test_what_make_runs_is_accepted(target, workspace, tiny_spec):
    policy = [f"policy={tiny_spec.source}"] if target == "serve" else []  # no run has finished here
    assert yaml.safe_load(run_here(f"{of_make(target)} --dry-run", workspace, *policy))


def run_here(command: str, workspace: "Workspace", *overrides: str) -> str:
    """What a job prints. It runs in this process, which has imported everything, and in the Ray that is there."""
    program, *words = shlex.split(command)
    assert program in (".venv/bin/python", ".venv/bin/qurl")
    script, *arguments = [program, *words] if program.endswith("qurl") else words
    workspace.capture.readouterr()
    workspace.patch.setattr(sys, "argv", [script, *arguments, *overrides])
    status: object = None
    try:
        qurl() if script == program else runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = end.code
    output, errors = workspace.capture.readouterr()
    assert not status, f"{command}: exit status {status}\n{output}\n{errors}"
    return output


@dataclass(frozen=True)
class Workspace:
    """A folder with jobs/ in it and runs/ to come, which is the working directory."""

    folder: Path
    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture


def small(command: str) -> list[str]:
    """Settings that make a run small, but for those that the command chooses."""
    chosen = {word.partition("=")[0] for word in shlex.split(command)}
    return [*(one for one in SMALL if one.partition("=")[0] not in chosen), "steps=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The working directory, with the files that docs/own-task.md has its reader write."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "jobs").symlink_to(ROOT / "jobs")
    for _, block in FENCE.findall((ROOT / "docs" / "own-task.md").read_text()):
        if named := re.match(r"# (\w+\.(?:py|yaml))\n", block):
            (folder / named[1]).write_text(block)
    (folder / "problems.jsonl").write_text('{"prompt": "1 + 1", "answer": 2}\n{"prompt": "1 + 2", "answer": 3}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.delenv("QURL_RUNS", raising=False)
        yield folder


@pytest.fixture(scope="module")
def cluster(folder):
    """One local Ray for all commands, started there."""
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def workspace(folder, monkeypatch, capsys):
    return Workspace(folder, monkeypatch, capsys)


@pytest.fixture
def quickstart(folder, workspace, cluster):
    """The run of `make quickstart`, finished: made by the first test that asks for it."""
    run = folder / "runs" / "quickstart"
    if not run.exists():
        command = of_make("quickstart")
        run_here(command, workspace, *small(command), "checkpoint.every=1", "tracking.mlflow=true")
    return run


def of_a_run(command: str) -> bool:
    """True if the command reads the quickstart's run, which a test of all kinds of runs makes likewise."""
    return "runs/quickstart" in command or "compare" in command


def slow_if_large(command: str) -> object:
    """The command as a case, slow if it loads a real model."""
    return pytest.param(command, marks=pytest.mark.slow) if "smollm2" in command else command


@pytest.mark.sampled(3)
@pytest.mark.ray
@pytest.mark.parametrize("command", [slow_if_large(c) for c in QUICK if not of_a_run(c)])
def test_a_quick_command_runs(command, workspace):
    assert run_here(command, workspace)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("command", [c for c in QUICK if of_a_run(c)])
def test_a_command_on_the_quickstarts_run_runs(command, workspace, quickstart):
    if "compare" in command:  # with what, is not the question
        shutil.copytree(quickstart, quickstart.with_name("another"))
    assert run_here(command, workspace)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "command", [c for c, _ in commands(ROOT / "docs" / "troubleshooting.md") if TRAINING.search(c)]
)
def test_a_remedy_is_accepted(command, workspace):
    assert yaml.safe_load(run_here(command, workspace, "--dry-run"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", TRAINS)
def test_a_training_command_is_accepted(command, workspace):
    assert yaml.safe_load(run_here(command, workspace, "--dry-run"))


# A run starts ten processes: in CI are the quickstart's and the example in Python.
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("command", TRAINS)
def test_a_training_command_runs(command, workspace, cluster):
    run_here(command, workspace, *small(command))
    name = next((w[5:] for w in shlex.split(command) if w.startswith("name=")), None)
    config = re.search(r"(?:--config|qurl train) (\S+)", command)
    run = workspace.folder / "runs" / (name or load_config(Path(config[1]) if config else None).name)
    assert json.loads((run / "summary.json").read_text())["steps"] == 1


@pytest.mark.slow
@pytest.mark.ray
def test_make_smollm2_trains(workspace, cluster):
    few = ["rollout.prompts_per_step=2", "algorithm.max_refill_rounds=2", "evaluation.problems=4", "checkpoint.every=0"]
    run_here(of_make("smollm2"), workspace, "steps=1", "tracking.mlflow=false", "tracking.console=none", *few)
    assert (workspace.folder / "runs" / "smollm2_135m" / "policy-int8").exists()


@pytest.mark.slow
@pytest.mark.ray
def test_the_example_in_python_runs(workspace, cluster, monkeypatch):
    (block,) = (block for kind, block in FENCE.findall((ROOT / "docs" / "api.md").read_text()) if kind == "python")
    smaller = lambda path, overrides: load_config(path, [*overrides, *SMALL, "steps=1"])  # noqa: E731
    monkeypatch.setattr("qurl_ray.config.load_config", smaller)
    exec(compile(block, "docs/api.md", "exec"), {"__name__": "__main__"})
    before_and_after, accuracy = workspace.capture.readouterr().out.splitlines()[-2:]
    assert before_and_after.endswith("runs/mine/policy")
    assert len(accuracy.split()) == 3


@pytest.mark.ray
def test_metrics_that_are_named_exist(quickstart):
    lines = (quickstart / "metrics.jsonl").read_text().splitlines()
    logged = {key for line in lines for key in json.loads(line)["values"]}
    known = logged | set(templates())
    kinds = "|".join({key.partition("/")[0] for key in logged if "/" in key})
    for page in NOW:
        for word in inline(page):
            if re.fullmatch(rf"({kinds}|value)/[a-z_0-9]+", word) and not (ROOT / "qurl_ray" / word).exists():
                assert word in known, f"{page}: no metric {word}"


@pytest.mark.ray
def test_mlflow_shows_the_runs(quickstart, monkeypatch):
    """Its server is MLflow's own, and takes long to start: what it is told to show is looked at instead."""
    from mlflow import MlflowClient, cli

    told: list[str] = []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # which the command sets, in this process
    monkeypatch.setattr("mlflow.server._run_server", lambda **settings: told.append(settings["file_store_path"]))
    (command,) = (command for command in ALL if "mlflow ui" in command)
    done = CliRunner().invoke(cli.cli, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    client = MlflowClient(*told)
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert run.info.run_name == quickstart.name
