"""What is left when a checkpoint cannot be written."""

from types import SimpleNamespace

import pytest

from qurl_ray.config import load_config
from qurl_ray.errors import CheckpointError
from qurl_ray.learner.learner import make_learner
from qurl_ray.loop.checkpoint import latest, partial_folder
from qurl_ray.loop.rank.objectives import objective_settings
from qurl_ray.loop.rank.saver import Saver
from qurl_ray.policy.load import load_model
from tests.loop.test_checkpoint import hold_open, write


@pytest.fixture
def saver(tiny_spec, tmp_path):
    config = load_config(None, [f"output_dir={tmp_path}", "export.quantized=none"])
    settings = objective_settings(config)
    learner = make_learner(load_model(tiny_spec), config.learner, settings, temperature=1.0, total_updates=1)
    coordinator = SimpleNamespace(
        state=SimpleNamespace(remote=lambda step: {"step": step}), tell=SimpleNamespace(remote=lambda event: None)
    )
    return Saver(config, learner, tiny_spec, coordinator, tmp_path, rank=0)


def test_a_full_disk_is_said_and_the_checkpoint_before_is_left(saver, tmp_path, small_files):
    write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2 cannot be written to .*File too large"):
        saver.checkpoint(2, None)
    with pytest.raises(CheckpointError, match="the final policy cannot be written"):
        saver.final()
    found, rejected = latest(tmp_path)
    assert (found.step, rejected) == (1, [])
    assert not (tmp_path / "policy").exists()


def test_a_half_written_checkpoint_that_cannot_be_removed_does_not_stop_the_next(saver, tmp_path, monkeypatch):
    left = partial_folder(tmp_path, 2) / "learner"
    left.mkdir(parents=True)
    (left / ".nfs0001").write_text("open elsewhere")
    hold_open(monkeypatch, ".nfs0001")
    monkeypatch.setattr("qurl_ray.loop.rank.saver.wait", lambda call, *_: call)
    saver.checkpoint(2, None)
    assert latest(tmp_path)[0].state() == {"step": 2}
