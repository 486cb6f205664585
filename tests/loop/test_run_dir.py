"""Run folders: older runs are kept, running ones are left alone."""

import pytest

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError
from qurl_ray.loop.run_dir import new_run_dir


def config(folder):
    return load_config(None, [f"output_dir={folder}", "name=mine"])


def test_older_runs_are_moved_aside_and_never_overwritten(tmp_path):
    for text in ("first", "second", "third"):
        with new_run_dir(config(tmp_path / "runs")) as run_dir:
            (run_dir / "summary.json").write_text(text)
    kept = {path.parent.name: path.read_text() for path in (tmp_path / "runs").glob("*/summary.json")}
    assert kept == {"mine": "third", "mine.1": "first", "mine.2": "second"}


def test_a_run_that_is_going_on_is_not_moved(tmp_path):
    with new_run_dir(config(tmp_path)) as run_dir:
        with pytest.raises(ConfigError, match="a run named mine is still going on"), new_run_dir(config(tmp_path)):
            pass
        assert run_dir.is_dir()
        with new_run_dir(load_config(None, [f"output_dir={tmp_path}", "name=other"])) as other:
            assert other.is_dir()


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set output_dir"), new_run_dir(config(tmp_path / "file")):
        pass
