"""docs/configuration.md says what the models say."""

from pathlib import Path

from qurl_ray.config.load import describe
from qurl_ray.config.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current():
    assert PAGE.read_text() == reference(), "run: python -m qurl_ray.config.reference > docs/configuration.md"


def test_every_setting_has_a_row():
    rows = [line.split("`")[1] for line in reference().splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(key for key, default, _ in describe() if default or "." in key.partition(".type=")[0])


def test_cells_do_not_break_the_tables():
    bars = {line.replace(r"\|", "").count("|") for line in reference().splitlines() if line.startswith("|")}
    assert bars == {4}
