"""What a rank makes of the settings before its first step, without Ray."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError
from qurl_ray.training.messages import Directive, Start
from qurl_ray.training.rank import train
from qurl_ray.training.rank.host_memory import check_memory
from qurl_ray.types import PolicySpec
from tests.ranks import run_ranks


class Made(Exception):
    """Carries what the learner was made of, and ends the rank there."""


@pytest.fixture
def learner_of(tiny_spec, tmp_path, monkeypatch):
    """Arguments of the learner that a rank makes of settings."""

    def stop(model, config, settings, **options):
        raise Made(options)

    start = Start(resume=None, version=0, directive=Directive(), over=False)
    rank = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1, get_local_world_size=lambda: 1)
    monkeypatch.setattr("ray.train.get_context", lambda: rank)
    monkeypatch.setattr(train, "own_assignment", lambda: None)
    monkeypatch.setattr(train, "_begin", lambda ask, timeout_s: start)
    monkeypatch.setattr(train, "make_learner", stop)
    monkeypatch.setattr(train, "_coordinator", lambda context: context["coordinator"])
    (tmp_path / "config.yaml").write_text("")  # so that the rank takes the folder for its run's

    def made(*settings: str) -> dict:
        config = load_config(None, ["learner.threads=2", *settings])
        context = {
            "config": config.model_dump(mode="json"),
            "spec": tiny_spec,
            "inputs": (),
            "run_dir": str(tmp_path),
        }
        calls = ("begin", "tell")
        coordinator = SimpleNamespace(**dict.fromkeys(calls, SimpleNamespace(remote=lambda *_: None)))
        with pytest.raises(Made) as raised:
            train.train_loop(context | {"coordinator": coordinator})
        return raised.value.args[0]

    return made


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.2])
def test_the_learner_scores_at_the_temperature_of_the_rollouts(learner_of, temperature):
    assert learner_of(f"rollout.temperature={temperature}")["temperature"] == temperature


def see(rank: int, ranks: int, spec, other, out: str) -> None:
    train.check_same_files(spec)
    try:
        train.check_same_files(other if rank else spec)
    except ConfigError as error:
        Path(out, str(rank)).write_text(str(error))


@pytest.mark.slow
def test_ranks_that_see_different_files_are_told_which(tiny_spec, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_spec.source, other)
    weights = other / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    run_ranks(2, see, tiny_spec, PolicySpec(source=str(other)), str(tmp_path))
    for rank in range(2):
        said = (tmp_path / str(rank)).read_text()
        assert re.search(r"different files in .*rank 0 on \S+: [0-9a-f]{16}; rank 1 on \S+: [0-9a-f]{16}", said)


def test_an_answer_that_no_rank_could_hold_is_refused_before_anything_is_loaded():
    settings = ["model.type=pretrained", "model.path=Qwen/Qwen2.5-7B", "rollout.max_new_tokens=32000"]
    with pytest.raises(
        ConfigError, match=r"at least \d\d\d.* GB for answers of 32,000 tokens.*learner\.sequence_parallel"
    ):
        check_memory(load_config(None, settings), 1)
    check_memory(load_config(None, ["rollout.max_new_tokens=4"]), 1)
    check_memory(load_config(None, [*settings, "sync.transport=my_transports:Files"]), 1)
    check_memory(
        load_config(None, ["model.type=pretrained", "model.path=some/unknown", "rollout.max_new_tokens=32000"]), 1
    )
