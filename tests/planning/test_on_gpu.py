"""A run on its own GPUs: whether it fits, whether ranks and engines stay there together, and the nearest settings."""

import pytest

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError
from qurl_ray.planning.on_gpu import beyond, fit_on_gpu

GB = 1e9


def fitted(preset, memory, *settings):
    return fit_on_gpu(load_config(preset, list(settings)), memory)


def test_both_stay_where_both_fit_and_take_turns_where_they_do_not():
    large, small = fitted("quickstart_gpu", 80 * GB), fitted("quickstart_gpu", 28 * GB)
    assert large.together
    assert not small.together
    assert str(large).endswith("; learner and engine stay there together")
    assert str(small).endswith("; learner and engine take turns")
    # Together, a turn to learn has the awake engine beside it; in turns, the one that sleeps.
    assert large.footprint.parts["learn"].keys() == {"learner", "CUDA", "engine", "keys and values"}
    assert small.footprint.parts["learn"].keys() == {"learner", "CUDA", "sleeping engine"}
    assert large.footprint.parts["sync"] == large.footprint.parts["learn"]


def test_settings_decide_against_the_memory():
    assert not fitted("quickstart_gpu", 80 * GB, "learner.offload_while_waiting=true").together
    assert fitted("quickstart_gpu", 80 * GB, "learner.offload_while_waiting=false").together
    assert not fitted("dapo_7b_math", 85 * GB).together


def test_two_cards_of_a_kind_decide_alike():
    """Their memory differs by some pages."""
    exact = max(fitted("quickstart_gpu", 80 * GB).footprint.gpu.values()) / 0.9
    assert {fitted("quickstart_gpu", memory).together for memory in (exact - 5e7, exact + 5e7)} != {True, False}


def test_what_is_beyond_the_memory_names_settings_that_fit():
    config = load_config("dapo_7b_math", [])
    fit = fit_on_gpu(config, 72 * GB)  # less than all of it, more than can be planned with
    told = beyond(config, fit)
    assert "sync takes 69.3 GB of a GPU, and 64.8 can be planned with" in told
    assert told.endswith(": set rollout.vllm.kv_cache_gb=20")
    changed = load_config("dapo_7b_math", ["rollout.vllm.kv_cache_gb=20"])
    assert beyond(changed, fit_on_gpu(changed, 72 * GB)) is None


@pytest.mark.parametrize("memory", [10, 16, 24])
def test_a_run_that_needs_more_than_the_whole_memory_is_refused_with_the_nearest_settings(memory):
    stays = "learner.offload_while_waiting=false"
    with pytest.raises(ConfigError, match=r"too large for its GPUs: \w+ takes .* GB .*: set (.*)") as caught:
        fitted("quickstart_gpu", memory * GB, stays)
    settings = str(caught.value).rpartition(": set ")[2].split()
    assert not fitted("quickstart_gpu", memory * GB, stays, *settings).footprint.problems


def test_where_no_setting_helps_it_says_so():
    with pytest.raises(ConfigError, match="take more or larger GPUs, or a smaller model"):
        fitted("dapo_32b", 16 * GB)


def test_nothing_is_said_of_runs_that_the_planner_does_not_know():
    assert fitted("quickstart", 1 * GB) is None
    assert fitted("quickstart_gpu", 1 * GB, "rollout.engine=torch", "sync.transport=object_store") is None
    assert fitted("dapo_7b_math", 1 * GB, "model.path=some/unknown") is None
