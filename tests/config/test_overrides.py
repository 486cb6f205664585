"""Overrides of one command line are a set: their order has no effect, and none of them is dropped."""

from itertools import permutations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from qurl_ray.cli.main import app
from qurl_ray.config import RunConfig, load_config
from qurl_ray.config.serving import load_serving
from qurl_ray.errors import ConfigError

FILE = """
model: {type: tiny, layers: 2, hidden_size: 128}
task: {operators: "+-", max_operand: 9}
algorithm:
  type: dapo
  objective: gspo
  clip_low: 0.11
  clip_high: 0.12
  dynamic_sampling: false
  correction: {type: tis, is_cap: 9, unit: sequence}
"""
SIX = {
    "algorithm.type": "grpo",
    "algorithm.clip_high": 0.3,
    "algorithm.correction.type": "mis",
    "algorithm.correction.high": 7.0,
    "task.type": "dataset",
    "task.path": "d/a.jsonl",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("settings") / "run.yaml"
    path.write_text(FILE)
    return path


def as_overrides(values):
    return [f"{key}={value}" for key, value in values]


@given(order=st.permutations(list(SIX.items())))
def test_any_order_of_six_overrides_of_typed_sections_gives_the_same_settings(file, order):
    expected = RunConfig.model_validate(
        {
            "model": {"type": "tiny", "layers": 2, "hidden_size": 128},
            "task": {"type": "dataset", "path": "d/a.jsonl"},
            "algorithm": {"type": "grpo", "clip_high": 0.3, "correction": {"type": "mis", "high": 7.0}},
        }
    )
    assert load_config(file, as_overrides(order)) == expected


@pytest.mark.parametrize("reverse", [False, True])
def test_a_dry_run_shows_the_same_settings_in_any_order(tmp_path, monkeypatch, reverse):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n' * 5)
    overrides = as_overrides((SIX | {"task.path": "a.jsonl", "task.reward": "exact"}).items())
    arguments = ["train", "quickstart", "--dry-run", *(overrides[::-1] if reverse else overrides)]
    shown = yaml.safe_load(CliRunner().invoke(app, arguments).stdout)
    assert (shown["algorithm"]["type"], shown["algorithm"]["clip_high"]) == ("grpo", 0.3)
    assert shown["algorithm"]["correction"]["high"] == 7.0
    assert shown["task"]["path"] == str(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    "given",
    [
        {"model.type": "pretrained", "model.path": "p", "model.max_length": 32},
        {"model.type": "gguf", "model.path": "p.gguf"},
        {"task.type": "reasoning_gym", "task.dataset": "chain_sum", "task.params": {"min_terms": 3}},
        {"algorithm.type": "ppo", "algorithm.value_clip": 0.1, "algorithm.critic": "shared"},
        {"algorithm.objective": "ppo", "algorithm.clip_low": 0.1, "algorithm.dual_clip": 3.0},
        {"environment.type": "calculator", "environment.params": {"format": "json"}, "environment.max_turns": 3},
        {"tracking.mlflow": False, "tracking.console": "none"},
    ],
    ids=str,
)
def test_what_is_given_is_what_counts_in_every_order(file, given):
    for order in permutations(given.items()):
        settings = load_config(file, as_overrides(order)).model_dump()
        for key, value in given.items():
            section, name = key.split(".")
            assert settings[section][name] == value, order


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (("algorithm.correction=geometric", "algorithm.correction.is_cap=8"), ("tis", "geometric", 8.0)),
        (("algorithm=grpo", "algorithm.correction=acr", "algorithm.correction.is_cap=8"), ("acr", "none", 8.0)),
        (("algorithm={correction: tis}", "algorithm.correction.is_cap=8", "algorithm.type=grpo"), ("tis", "none", 8.0)),
        (("algorithm.correction={is_cap: 8}", "algorithm.correction.type=tis"), ("tis", "none", 8.0)),
        (("algorithm.correction={is_cap: 7}", "algorithm.correction.is_cap=8"), ("acr", "none", 8.0)),
    ],
)
def test_a_section_given_whole_or_by_a_name_is_set_before_its_settings(given, wanted):
    for order in permutations(given):
        correction = load_config(None, order).algorithm.correction
        assert (correction.type, correction.reject, correction.is_cap) == wanted


@pytest.mark.parametrize(
    ("given", "unknown"),
    [
        (("model.hidden_size=64", "model.type=pretrained", "model.path=x"), "model.hidden_size"),
        (("algorithm.correction.is_cap=3", "algorithm.correction.type=ignore"), "algorithm.correction.is_cap"),
        (("algorithm.correction.is_cap=3", "algorithm.correction=ignore"), "algorithm.correction.is_cap"),
        (("task.operators=+", "task.type=custom", "task.problems=a:b"), "task.operators"),
        (("algorithm.value_clip=0.1", "algorithm=grpo"), "algorithm.value_clip"),
    ],
)
def test_an_override_that_the_chosen_type_does_not_know_is_an_error_in_every_order(given, unknown):
    for order in permutations(given):
        with pytest.raises(ConfigError, match=f"{unknown} is a setting of "):
            load_config(None, order)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("algorithm.correction=geometric", "algorithm.correction.type=mis"), "correction two types, tis and mis"),
        (("algorithm={type: grpo, clip_high: 0.1}", "algorithm.type=ppo"), "algorithm two types, grpo and ppo"),
        (("algorithm={correction: ignore}", "algorithm.correction.type=tis"), "correction two types, ignore and tis"),
    ],
)
def test_two_types_of_a_section_are_refused_in_every_order(given, message):
    for order in permutations(given):
        with pytest.raises(ConfigError, match=message):
            load_config(None, order)


def test_what_a_new_type_or_objective_drops_is_the_files_alone(file):
    algorithm = load_config(file, ["algorithm.clip_high=0.5", "algorithm.objective=ppo"]).algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dynamic_sampling) == (0.2, 0.5, False)
    algorithm = load_config(file, ["algorithm.clip_high=0.5", "algorithm.type=grpo"]).algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.objective) == (0.2, 0.5, "ppo")
    given = ["algorithm={clip_low: 0.1, clip_high: 0.4, correction: tis}", "algorithm.objective=gspo"]
    algorithm = load_config(file, given).algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.objective) == (0.1, 0.4, "gspo")


def test_of_a_key_that_is_given_twice_the_last_value_counts():
    assert load_config(None, ["steps=3", "steps=4"]).steps == 4
    assert load_config(None, ["algorithm.type=grpo", "algorithm.type=ppo"]).algorithm.type == "ppo"


def test_settings_of_serving_have_no_order_either():
    given = ("slots=7", "quantization=int8", "replicas=2", "max_replicas=3")
    first, *others = (load_serving(None, order) for order in permutations(given))
    assert all(other == first for other in others)
