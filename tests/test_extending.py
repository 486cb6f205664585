"""docs/extending.md: its examples, as a user would write them into files of their own, in one training run."""

import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import qurl_ray.tables
from qurl_ray.config import load_config
from qurl_ray.config.rollout import FormatName
from qurl_ray.config.task import TaskConfig
from qurl_ray.data.tasks import load_task
from qurl_ray.errors import ConfigError, DataError, QurlError
from qurl_ray.extensions import Table, import_reference
from qurl_ray.quant.formats import FORMATS
from qurl_ray.rl import advantages, surrogate
from qurl_ray.tables import ADVANTAGES, ENGINES, OBJECTIVES, TASKS
from qurl_ray.tracking.tracker import Tracker
from qurl_ray.training.driver.early import prepare_task
from qurl_ray.training.driver.functions import try_functions
from qurl_ray.training.driver.job import run_job
from qurl_ray.training.rank.objectives import objective_settings
from qurl_ray.types import Event, Problem
from tests.training.runs import ROOT, SMALL, events

PAGE = ROOT / "docs" / "extending.md"
FILE = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```sh\n\.venv/bin/python (.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def here(tmp_path):
    """A folder with the page's files, where a user would start the job."""
    for name, text in FILE.findall(PAGE.read_text()):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def imports(here, monkeypatch):
    """Modules in `here` can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(here))
    yield
    for name in [file.stem for file in here.glob("my_*.py")]:
        sys.modules.pop(name, None)


def settings(here):
    """(script, settings) of the page's command, smaller."""
    (command,) = COMMAND.findall(PAGE.read_text())
    script, *given = shlex.split(command.replace("\\\n", " "))
    smaller = [setting for setting in SMALL if not setting.startswith("task.")]
    return script, [*given, *smaller, "steps=2", f"output_dir={here}"]


@pytest.mark.slow
@pytest.mark.ray
def test_functions_from_outside_the_package_train(here):
    """Each is used: its trace is in what the run leaves."""
    log = here / "calls.txt"
    for name in ("my_advantages", "my_corrections", "my_objectives", "my_engines", "my_transports"):
        file = here / f"{name}.py"
        counting = rf"\n\1open({str(log)!r}, 'a').write({name!r} + '\\n')\n\1return"
        file.write_text(re.sub(r"\n( +)return", counting, file.read_text()))
    script, given = settings(here)
    arguments = [sys.executable, str(ROOT / script), *given]
    done = subprocess.run(arguments, cwd=here, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    steps = events(here / "extended", "step")
    rewards = json.loads((here / "extended" / "rewards.json").read_text())
    assert rewards == {"outcome": "finished", "rewards": {str(s["step"]): s["values"]["reward/mean"] for s in steps}}
    assert 0 < steps[0]["values"]["reward/mean"] < 1  # graded
    shown = [sample for e in events(here / "extended", "samples") for sample in e["values"]["samples"]]
    assert all(re.fullmatch(r"(\d+)\+\1=", sample["prompt"]) for sample in shown)
    calls = log.read_text().split()
    tried, used = 3, 2 * 4  # the trial of the objective, and each step's updates
    assert calls.count("my_objectives") >= 2 * (tried + used)  # once more for its slope
    assert calls.count("my_corrections") >= used
    assert calls.count("my_advantages") >= 1 + 2
    assert calls.count("my_engines") >= 2 * 2  # returns, of generate and of what it passes on
    assert calls.count("my_transports") >= 3 * 2  # versions, of several buckets or one
    gaps = [step["values"].get("sync/probe_gap_max") for step in steps]
    assert gaps[0] == 0  # it is the torch engine; not every version is probed
    assert {*gaps} <= {0, None}


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "my_objectives",
            "def soft(log_ratio_BT, ",
            "def soft(",
            r"must take \(log_ratio_BT, adv_BT, ",
        ),
        ("my_objectives", "ratio_BT * adv_BT - pull_BT, 0.0)", "adv_BT, 0.0)", "its value has no gradient"),
        (
            "my_objectives",
            ", 0.0)",
            ", 0.0).sum()",
            r"returned a tensor \[\], expected a Surrogate or ",
        ),
        ("my_objectives", "log_ratio_BT.exp()", "(log_ratio_BT - 1).sqrt()", "not finite at a log ratio of 0"),
        ("my_objectives", "log_ratio_BT.exp()", "1 / 0", "objective my_objectives:soft failed: ZeroDivisionError"),
        ("my_corrections", "torch.exp(", "torch.neg(1 + ", "negative or not finite"),
        ("my_corrections", "torch.exp(", "1 / 0 + (", "correction my_corrections:smooth failed: ZeroDivisionError"),
        ("my_advantages", "better = (", "better = 1 / 0 + (", "advantage my_advantages:ranks failed: ZeroDiv"),
        ("my_corrections", "smooth", "smoth", "my_corrections has no smooth; did you mean 'smoth'"),
        (
            "my_advantages",
            "better - worse)",
            "better - worse)[:1]",
            r"an array \[1, 4\], expected a numpy array \[2, 4\]",
        ),
        (
            "my_advantages",
            "return ",
            "return [] and ",
            r"returned list, expected a numpy array \[2, 4\]",
        ),
        (
            "my_advantages",
            "(better - worse)",
            "(rewards_PG - rewards_PG.mean(axis=1, keepdims=True))",
            "is not finite: nan for sample 0 of prompt 1, whose sample 3 is missing: .*np.nanmean",
        ),
        ("my_advantages", "(better - worse)", "np.nan * better", "not finite"),
        ("my_tasks", '"prompt": f"{number}+{number}="', '"question": "?"', "problem train-0 has the key 'question'"),
        ("my_tasks", "yield", "1 / 0; yield", "failed with task.params {'largest': 200}: ZeroDivisionError"),
        ("my_rewards", "(answer: str, problem)", "(answer: str)", r"must take \(answer, problem\)"),
        ("my_sinks", "def notices", "def other", "has no notices"),
        ("my_engines", "self, spec, options", "self, spec", r"must take \(spec, options\)"),
        ("my_transports", "def abort", "def other", r"has no abort \(qurl_ray.weights.transports.protocol.Transport\)"),
        ("my_transports", "def __init__(self, link)", "def __init__(self)", r"must take \(link\)"),
        ("my_sinks", "self, run_dir, settings", "self", r"must take \(run_dir, settings\)"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_that_names_it(here, imports, file, old, new, message):
    path = here / f"{file}.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    config = load_config(None, settings(here)[1])

    def begin():
        """What a run does before it makes an actor."""
        try_functions(config)
        prepare_task(config)
        Tracker(here / "run", config, resolved={}).close("failed")

    with pytest.raises(QurlError, match=message) as caught:
        begin()
    assert file in str(caught.value)
    if "1 / 0" in new:  # what was raised in the user's own code, and where
        place = rf"ZeroDivisionError: division by zero \({path}, line \d+, in \w+; traceback in (\S+)\)"
        (kept,) = re.findall(place, str(caught.value))
        assert f'File "{path}", line' in Path(kept).read_text()


def test_a_traceback_in_a_file_of_errors_is_not_overwritten_by_what_is_printed_later(tmp_path):
    """The shell opens `2> file` without appending."""
    code = (
        "import sys; from qurl_ray.extensions import described\n"
        "try: eval(compile('1 / 0', 'mine.py', 'eval'))\n"
        "except ZeroDivisionError as error: sys.stderr.write(described(error) + ' and later lines\\n' * 20)\n"
    )
    with (tmp_path / "err.txt").open("w") as errors:
        subprocess.run([sys.executable, "-c", code], stderr=errors, check=True, cwd=ROOT)
    printed = (tmp_path / "err.txt").read_text()
    assert printed.startswith("Traceback (most recent call last):")
    assert f"(mine.py, line 1, in <module>; traceback in {tmp_path}/err.txt) and later lines" in printed


class Faulty:
    """A sink that works until the run begins."""

    name = "faulty"

    def __init__(self, run_dir, settings):
        self.handled = 0

    def handle(self, event, at):
        self.handled += 1

    def notices(self):
        if self.handled > 1:
            raise RuntimeError("no notices")

    def close(self, outcome):
        raise RuntimeError("not closed")


def test_a_sink_that_fails_later_ends_nothing_and_is_announced(tmp_path):
    config = load_config(None, ["tracking.sinks=[tests.test_extending:Faulty]", "tracking.mlflow=false"])
    with Tracker(tmp_path, config, resolved={}) as tracker:
        for step in range(1, 4):
            tracker.handle(Event(kind="info", step=step, message="alive"))
    assert [e["step"] for e in events(tmp_path, "info")] == [1, 2, 3]
    (warning,) = events(tmp_path, "warning")
    assert "faulty failed (RuntimeError: no notices (" in warning["message"]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([{"prompt": "1", "uid": "a"}, {"prompt": "2", "uid": "a"}], "several problems with the uid 'a'"),
        ({"train": [{"prompt": "1", "uid": 0}], "held_out": [{"prompt": "2", "uid": 0}]}, "with the uid '0'"),
        ([{"prompt": "1"}, {"prompt": " "}], "problem train-1 has no prompt"),
        ([{"prompt": "1", "meta": 3}, {"prompt": "2"}], "the meta of problem train-0 is int"),
        ([{"prompt": "1"}], "has one usable problem only"),
        ({"train": [{"prompt": "1"}]}, r"the keys \['train'\]"),
        ("text", "returned str, expected problems"),
    ],
)
def test_problems_that_cannot_be_used_are_an_error(monkeypatch, made, message):
    monkeypatch.setitem(globals(), "given", lambda: made)
    config = load_config(None, ["task.type=custom", "task.problems=tests.test_extending:given"])
    with pytest.raises(DataError, match=message):
        prepare_task(config)


def test_problems_are_taken_as_they_are_given(monkeypatch):
    mine = [Problem(uid="a", prompt="1", answer="1"), {"prompt": "2", "answer": None, "meta": {"level": 3}}]
    monkeypatch.setitem(globals(), "given", lambda: mine)
    config = load_config(None, ["task.type=custom", "task.problems=tests.test_extending:given"])
    task = load_task(config.task, eval_problems=9)
    assert list(task.train) == [mine[0]]
    assert list(task.held_out) == [Problem(uid="train-1", prompt="2", answer="", meta={"level": 3})]


def test_help_needs_no_torch():
    code = "import sys, qurl_ray.training.driver.job; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_dry_run_tries_the_functions_too(here, imports, capsys):
    config = load_config(None, settings(here)[1])
    assert run_job(config, dry=True, fresh=False) == 0
    (here / "my_objectives.py").write_text("def soft(): ...")
    sys.modules.pop("my_objectives")
    with pytest.raises(QurlError, match="must take"):
        run_job(config, dry=True, fresh=False)


def test_an_entry_point_is_a_short_name(here, imports):
    """Of an installed package: its metadata lie on the path."""
    info = here / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[qurl_ray.objectives]\nsoft = my_objectives:soft\n[qurl_ray.corrections]\nsmooth = my_corrections:smooth\n"
    )
    config = load_config(None, ["algorithm.objective=soft", "algorithm.correction=smooth"])
    assert OBJECTIVES.load(config.algorithm.objective).__module__ == "my_objectives"
    assert objective_settings(config).correction.weigh.__module__ == "my_corrections"
    with pytest.raises(ConfigError, match=r"objective 'sof' is neither built in .*did you mean 'soft'"):
        load_config(None, ["algorithm.objective=sof"])


def test_what_is_built_in_can_be_imported():
    """A table holds references; a function that moved would be found only when it is used."""
    tables = [value for value in vars(qurl_ray.tables).values() if isinstance(value, Table)]
    assert len(tables) == 11
    for table in tables:
        for name in table.entries:
            if name != "verifiers":  # which cannot be installed beside the packages of these tests
                assert callable(table.load(name))
    for entry in ENGINES.entries.values():
        if entry.check:
            assert callable(import_reference(entry.check))
    assert {task.model_fields["type"].default for task in get_args(get_args(TaskConfig)[0])} == set(TASKS.entries)


def test_a_function_of_the_package_is_in_its_table():
    """Whoever adds one and forgets the table has added nothing that settings can name."""
    for module, table in ((surrogate, OBJECTIVES), (advantages, ADVANTAGES)):
        found = [f for name, f in vars(module).items() if inspect.isfunction(f) and not name.startswith("_")]
        alike = {f for f in found if tuple(inspect.signature(f).parameters) == table.arguments}
        assert alike == {table.load(name) for name in table.entries}
    assert set(get_args(FormatName)) == {"none", *FORMATS}
