"""What a run asks of Ray, what a cluster can never hold, and which GPUs a colocated engine has."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl_ray.actors.placement import Demand, GpuAssignment, demand, engine_assignments, what_is_missing
from qurl_ray.config import load_config
from qurl_ray.errors import PlacementError

CONFIGS = Path(__file__).parents[2] / "qurl_ray" / "configs"
PRESETS = sorted(path.stem for path in CONFIGS.glob("*.yaml") if "Made for 8 GPUs" in path.read_text())
BOX = {"CPU": 64.0, "GPU": 8.0}


def preset(name: str, *overrides: str):
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def test_the_presets_for_eight_gpus_are_these():
    assert PRESETS == [
        "dapo_7b_math", "deepscaler_grpo", "deepscaler_grpo_16k", "deepscaler_grpo_24k", "gsm8k_ppo",
        "jet_rl_llama31_8b", "jet_rl_qwen25_7b", "jet_rl_qwen3_8b", "olmoe_7b_1b", "qwen3_8b_1node",
    ]  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_for_eight_gpus_fits_on_a_box_of_eight_and_apart_on_two(name):
    asked = demand(preset(name))
    assert asked.total == {"CPU": 8, "GPU": 8}
    assert what_is_missing(asked, [BOX]) is None
    apart = demand(preset(name, "placement=disaggregated"))
    assert apart.total == {"CPU": 16, "GPU": 16}
    assert what_is_missing(apart, [BOX, BOX]) is None
    assert what_is_missing(apart, [BOX]) == "16 GPU are asked for, and it has 8 GPU in all"


def test_it_says_what_it_asks_for():
    four = ["learner.workers=4", "rollout.workers=2", "rollout.vllm.tensor_parallel=2"]
    assert str(demand(preset("jet_rl_qwen3_8b", *four))) == (
        "4 learner ranks of 1 GPU with 2 rollout workers of 2 GPU on the same (colocated): 4 CPU, 4 GPU"
    )
    assert str(demand(preset("jet_rl_qwen3_8b", *four, "placement=disaggregated"))) == (
        "4 learner ranks of 1 GPU and 2 rollout workers of 2 GPU (disaggregated): 6 CPU, 8 GPU"
    )
    assert str(demand(load_config(None))) == (
        "1 learner rank of 1 CPU and 1 rollout worker of 1 CPU (disaggregated): 2 CPU"
    )


def asked_for(ranks: int, workers: int, each: int) -> Demand:
    return Demand(
        ranks=ranks,
        rank={"CPU": 1.0, "GPU": 1.0},
        workers=workers,
        worker={"CPU": 1.0, "GPU": float(each)},
        shared=each,
    )


def test_an_engine_is_never_split_over_nodes():
    three = [{"CPU": 9.0, "GPU": 3.0}] * 2
    assert what_is_missing(asked_for(ranks=2, workers=2, each=2), three) is None
    assert what_is_missing(asked_for(ranks=0, workers=3, each=2), three) == (
        "3 rollout workers of 1 CPU, 2 GPU are asked for, each on one node, and there is room for 2: no node has more "
        "than 3 GPU"
    )
    assert "room for 0: no node has more than 8 GPU" in what_is_missing(asked_for(8, 1, each=16), [BOX] * 4)


@given(
    nodes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    ranks=st.integers(0, 9),
    workers=st.integers(0, 4),
    each=st.integers(1, 4),
)
def test_what_is_refused_has_no_placement_and_what_has_none_is_refused(nodes, ranks, workers, each):
    """With CPUs to spare: ranks take what engines leave."""
    missing = what_is_missing(asked_for(ranks, workers, each), [{"CPU": 99.0, "GPU": float(gpus)} for gpus in nodes])
    fits = sum(gpus // each for gpus in nodes) >= workers and sum(nodes) >= workers * each + ranks
    assert (missing is None) == fits


def assignments(*nodes: str) -> list[GpuAssignment]:
    """Of ranks on these nodes; their GPUs are numbered from the last."""
    return [GpuAssignment(node=node, gpus=(str(7 - nodes[:i].count(node)),)) for i, node in enumerate(nodes)]


def test_engines_share_out_the_gpus_of_the_ranks_node_by_node():
    ranks = assignments("a", "a", "b", "a", "b", "a")
    assert engine_assignments(ranks, 1) == [ranks[i] for i in (0, 1, 3, 5, 2, 4)]
    assert engine_assignments(ranks, 2) == [
        GpuAssignment(node="a", gpus=("7", "6")),
        GpuAssignment(node="a", gpus=("5", "4")),
        GpuAssignment(node="b", gpus=("7", "6")),
    ]
    assert engine_assignments([GpuAssignment(node="a")] * 2, 1) == [GpuAssignment(node="a")] * 2  # on CPUs


def test_an_engine_with_gpus_of_two_nodes_is_refused():
    with pytest.raises(PlacementError, match=r"tensor_parallel=2 .*placed 3 on node a, 1 on node b: set learner.work"):
        engine_assignments(assignments("a", "a", "a", "b"), 2)
