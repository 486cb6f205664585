"""docs/extending.md: its examples, as a user would write them into files of their own, in one training run."""

import inspect
import json
import re
import shlex
import subprocess
import sys
from typing import get_args

import pytest

from qurl_ray.config import load_config
from qurl_ray.config.models import TaskConfig
from qurl_ray.config.rollout import Format
from qurl_ray.errors import ConfigError, QurlError
from qurl_ray.loop.driver.functions import try_functions
from qurl_ray.loop.driver.job import train
from qurl_ray.loop.driver.prepare import prepare_task
from qurl_ray.loop.rank.objectives import objective_settings
from qurl_ray.quant.formats import FORMATS
from qurl_ray.rl import advantages, surrogate
from qurl_ray.tables import ADVANTAGES, CORRECTIONS, OBJECTIVES, PROBLEMS, REWARDS, SINKS, TASKS
from qurl_ray.tracking.tracker import Tracker
from tests.loop.runs import ROOT, SMALL, events

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


@pytest.mark.ray
def test_functions_from_outside_the_package_train(here):
    """Each is used: its trace is in what the run leaves."""
    log = here / "calls.txt"
    for name in ("my_advantages", "my_corrections", "my_objectives"):
        file = here / f"{name}.py"
        counting = f"\nopen({str(log)!r}, 'a').write({name!r} + '\\n')\n    return"
        file.write_text(file.read_text().replace("\n    return", counting.replace("\nopen", "\n    open")))
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
        ("my_corrections", "torch.exp(", "torch.neg(1 + ", "negative or not finite"),
        ("my_corrections", "smooth", "smoth", "my_corrections has no smooth; did you mean 'smoth'"),
        ("my_advantages", "better - worse)", "better - worse)[:1]", r"the shape \[1, 3\]"),
        ("my_advantages", "(better - worse)", "np.nan * better", "not finite"),
        ("my_tasks", '"prompt": f"{number}+{number}="', '"question": "?"', "problem train-0 has the key 'question'"),
        ("my_tasks", "yield", "1 / 0; yield", "failed with task.params {'largest': 200}: ZeroDivisionError"),
        ("my_rewards", "(answer: str, problem)", "(answer: str)", r"must take \(answer, problem\)"),
        ("my_sinks", "def notices", "def other", "has no notices"),
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


def test_a_dry_run_tries_the_functions_too(here, imports, capsys):
    config = load_config(None, settings(here)[1])
    assert train(config, dry=True, fresh=False) == 0
    (here / "my_objectives.py").write_text("def soft(): ...")
    sys.modules.pop("my_objectives")
    with pytest.raises(QurlError, match="must take"):
        train(config, dry=True, fresh=False)


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
    for table in (OBJECTIVES, ADVANTAGES, CORRECTIONS, TASKS, PROBLEMS, REWARDS, SINKS):
        for name in table.entries:
            assert callable(table.load(name))
    assert {task.model_fields["type"].default for task in get_args(get_args(TaskConfig)[0])} == set(TASKS.entries)


def test_a_function_of_the_package_is_in_its_table():
    """Whoever adds one and forgets the table has added nothing that settings can name."""
    for module, table in ((surrogate, OBJECTIVES), (advantages, ADVANTAGES)):
        found = [f for name, f in vars(module).items() if inspect.isfunction(f) and not name.startswith("_")]
        alike = {f for f in found if tuple(inspect.signature(f).parameters) == table.arguments}
        assert alike == {table.load(name) for name in table.entries}
    assert set(get_args(Format)) == {"none", *FORMATS}
