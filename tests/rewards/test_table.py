"""From the name of a reward to the function, or to an error that helps."""

import subprocess
import sys

import pytest

from qurl_ray.errors import RewardError
from qurl_ray.rewards import scorers
from qurl_ray.tables import REWARDS

pytestmark = pytest.mark.usefixtures("bad_rewards_can_be_imported")


@pytest.mark.parametrize("name", REWARDS.entries)
def test_the_built_in_rewards_have_short_names(name):
    assert REWARDS.load(name) is getattr(scorers, name)


def test_a_users_function_is_found_by_module_and_name():
    assert REWARDS.load("bad_rewards:raises").__module__ == "bad_rewards"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exakt", "neither built in .* did you mean 'exact'"),
        ("bad_rewards", "neither built in"),
        ("bad_rewards:", "neither built in"),
        (":f", "neither built in"),
        ("a/b.py:f", "neither built in"),
        ("no_such_module:f", r"cannot import no_such_module: ModuleNotFoundError: No module named 'no_such_module'$"),
        ("bad_rewards:raise", "bad_rewards has no raise; did you mean 'raises'"),
        ("bad_rewards:NOT_A_FUNCTION", "is int, not a function"),
        ("bad_rewards:takes_one_argument", r"must take \(answer, problem\), it takes \(answer\)"),
    ],
)
def test_a_bad_name_is_an_error_that_says_what_is_wrong(spec, message):
    with pytest.raises(RewardError, match=message):
        REWARDS.load(spec)


def test_a_module_that_breaks_on_import_is_a_reward_error(tmp_path, monkeypatch):
    (tmp_path / "breaks_on_import.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RewardError, match="cannot import breaks_on_import: ZeroDivisionError"):
        REWARDS.load("breaks_on_import:f")


def test_rewards_need_neither_torch_nor_ray():
    code = "import sys, qurl_ray.rewards.process, qurl_ray.rewards.child; print({'torch', 'ray'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert output.strip() == "set()"
