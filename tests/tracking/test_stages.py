"""Stages of a start: what a run that hangs has said, on its console and in its folder."""

import io
import re
import threading
from pathlib import Path

import pytest
from rich.console import Console

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError
from qurl_ray.tracking import stages
from qurl_ray.tracking.stages import Stages
from qurl_ray.tracking.tracker import Tracker
from qurl_ray.types import Event


def stage(message: str, step: int = 0) -> Event:
    return Event(kind="phase", step=step, message=message)


class Shown(list):
    """Lines that were shown, and a way to wait for their number."""

    def __init__(self) -> None:
        super().__init__()
        self.more = threading.Condition()

    def __call__(self, line: str, step: int) -> None:
        with self.more:
            self.append((line, step))
            self.more.notify_all()

    def wait_for(self, count: int) -> None:
        with self.more:
            assert self.more.wait_for(lambda: len(self) >= count, timeout=600)


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.setattr(stages, "_EVERY_S", 0.01)
    return Shown()


def test_a_stage_that_lasts_is_repeated_with_its_seconds_and_the_file_has_every_line(tmp_path, shown):
    sink = Stages(tmp_path / "logs" / "stages.log", shown)
    sink.handle(stage("starting Ray", step=7), 0.0)
    shown.wait_for(3)
    assert shown[0] == ("starting Ray", 7)
    assert all(re.fullmatch(r"starting Ray: \d+ s so far", line) for line, _ in shown[1:])
    # at once, and not when the file is closed: the process may be killed
    written = (tmp_path / "logs" / "stages.log").read_text().splitlines()
    assert len(written) >= 3
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d starting Ray", written[0])
    sink.close("interrupted")


@pytest.mark.parametrize("kind", ["step", "evaluation"])
def test_a_stage_ends_with_what_it_was_for(tmp_path, shown, kind):
    sink = Stages(tmp_path / "stages.log", shown)
    sink.handle(stage("step 1"), 0.0)
    sink.handle(Event(kind=kind, step=1), 0.0)
    sink.handle(stage("evaluating 40 problems", 1), 0.0)
    shown.wait_for(4)
    after = [line for line, _ in shown if line.startswith("step 1")]
    sink.close("finished")
    assert len(after) <= 2  # one may have been due
    assert shown[-1][0].startswith("finished in this stage, after ")


def test_a_run_that_fails_says_in_which_stage(tmp_path):
    screen = Console(file=io.StringIO(), width=200)
    config = load_config(None, ["tracking.mlflow=false", "tracking.console=plain"])
    with Tracker(tmp_path, config, resolved={}, console=screen) as tracker:
        tracker.handle(stage("placing and starting rollout workers"))
        tracker.close("failed")
    last = r"failed in this stage, after \d+ s: placing and starting rollout workers"
    assert re.search(last, screen.file.getvalue())
    assert re.search(last, (tmp_path / "logs" / "stages.log").read_text())


def test_a_disk_that_is_full_later_ends_neither_the_lines_nor_the_run(tmp_path, shown):
    sink = Stages(tmp_path / "stages.log", shown)
    sink._file.close()
    sink._file = Path("/dev/full").open("a")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        sink.handle(stage("starting Ray"), 0.0)  # the tracker reports it
    sink._file = (tmp_path / "stages.log").open("a")
    shown.wait_for(2)
    sink.close("finished")


def test_a_folder_that_cannot_be_written_is_an_error():
    with pytest.raises(ConfigError, match=r"cannot write /proc/x/stages\.log"):
        Stages(Path("/proc/x/stages.log"), None)
