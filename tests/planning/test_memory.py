"""Memory of engines, learners and hosts against arithmetic done here by hand, in other words than theirs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.planning import memory
from qurl_ray.planning.machines import CONSTANTS, GPUS, PRECISIONS
from qurl_ray.planning.memory import (
    STAGES,
    Layout,
    activation_bytes,
    asleep_bytes,
    footprint,
    gpu_parts,
    held,
    host_bytes,
    kv_room,
    kv_slots,
    learner_bytes,
)
from qurl_ray.planning.shapes import SHAPES
from qurl_ray.planning.speed import EngineRoofline
from qurl_ray.planning.workload import Workload
from qurl_ray.policy import save

SEVEN, HALF, H100 = SHAPES["Qwen2.5-7B"], SHAPES["Qwen2.5-0.5B"], GPUS["h100"]
LINEARS = 28 * (3584 * 3584 * 2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
HEAD = 152064 * 3584
TWICE = 4 * 151936 * 896
"""Of Qwen2.5-0.5B, whose head is its embedding: the gradient of one, while that of the other is there."""


def engine(precision="bf16", **changed):
    return EngineRoofline(**({"shape": SEVEN, "gpu": H100, "precision": precision} | changed))


# --- engines -------------------------------------------------------------------------------------


def test_room_for_keys_by_hand():
    weights = 2 * (LINEARS + 2 * HEAD)
    assert kv_room(engine()) == pytest.approx(0.9 * 85.5e9 - 4.6e9 - weights)  # 3.1 of activations, 1.5 of graphs
    assert kv_room(engine("int8"), beside=7e9) == pytest.approx(kv_room(engine()) + LINEARS - 7e9)
    pair = kv_room(engine(tensor_parallel=2), beside=7e9)
    assert pair == pytest.approx(2 * (0.9 * 85.5e9 - 4.6e9 - 7e9) - weights)


def test_slots_hold_what_answers_have_on_average():
    work = Workload(prompt=200, response=8192, mean=8192.0, slots=10_000)
    assert held(work) == 8192  # alike: all are full at once
    assert kv_slots(engine(), work, 40e9) == int(40e9 / (57344 * 8392))
    assert held(Workload(response=8000, mean=4000.0)) == pytest.approx(8000 / 3)  # uniform: max²/3 / (2 · max/2)


def test_a_context_that_does_not_fit_leaves_no_slot():
    work = Workload(prompt=1, response=999, mean=999.0)
    assert kv_slots(engine(), work, 57344 * 1000) == 1
    assert kv_slots(engine(), work, 57344 * 999) == 0


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(SHAPES)), st.sampled_from(sorted(GPUS)), st.sampled_from([1, 2, 4]))
def test_codes_never_take_more_memory(name, gpu, width):
    of = {
        precision: kv_room(
            EngineRoofline(shape=SHAPES[name], gpu=GPUS[gpu], precision=precision, tensor_parallel=width)
        )
        for precision in PRECISIONS
    }
    assert of["bf16"] < of["int8"] == of["fp8"]


# --- learners ------------------------------------------------------------------------------------

TINY_BATCH = Workload(prompt=1, response=7, mean=4.0, micro_tokens=8, autocast=False)


@pytest.mark.parametrize(
    ("stage", "ranks", "states"),
    [
        (0, 1, 16),
        (1, 1, 20),
        (2, 1, 20),
        (3, 1, 20),
        (0, 4, 16),
        (1, 4, 4 + 4 + 12 / 4),
        (2, 4, 4 + (4 + 4 + 8) / 4),
        (3, 4, (4 + 4 + 4 + 8) / 4),
    ],
)
def test_states_of_each_stage(stage, ranks, states):
    """A micro-batch of eight tokens leaves states, and buffers of fixed size and gathered parameters, or a step's
    gradients, where these are more."""
    found = learner_bytes(HALF, TINY_BATCH, ranks=ranks, stage=stage)["learn"]
    buffers = {0: 2e9 if ranks > 1 else 0, 1: 0.4e9, 2: 0.4e9, 3: 0.2e9}[stage]
    gathered = 4 * HALF.params if stage == 3 and ranks > 1 else 0  # the model has less than 1e9 parameters
    joined = 0.2e9 if stage == 3 else 0  # gradients, as many as the buffer holds
    kept = activation_bytes(HALF, TINY_BATCH) + 3 * 4 * 151936 * 8
    passing = buffers + gathered + joined + kept + TWICE
    stepping = 4 * HALF.params / ranks + (buffers if stage == 3 else 0) if stage else 0  # gradients of a rank's share
    assert found == pytest.approx(HALF.params * states + max(passing, stepping), rel=1e-6)


def test_stage_three_holds_20_to_25_bytes_of_a_parameter():
    learner = learner_bytes(SHAPES["Qwen3-8B"], TINY_BATCH, ranks=1, stage=3)["learn"] / SHAPES["Qwen3-8B"].params
    assert 20 < learner < 25


def test_autocast_keeps_copies_of_all_weights_unless_blocks_are_computed_again():
    def held_(**changed):
        work = Workload(prompt=1, response=7, mean=4.0, micro_tokens=8, **changed)
        return learner_bytes(SEVEN, work, ranks=8, stage=3)["learn"]

    block = 2 * 8 * (6 * 3584 + 2 * 32 * 128 + 4 * 18944)  # bytes that bfloat16 saves of its activations
    for again, copies, blocks in ((False, SEVEN.params, SEVEN.layers), (True, HEAD, 1)):
        found = held_(checkpointing=again) - held_(checkpointing=again, autocast=False)
        assert found == pytest.approx(2 * copies - blocks * block)


def test_a_rank_starts_with_the_whole_model_and_gives_up_all_but_what_a_turn_needs():
    sharded = learner_bytes(SEVEN, TINY_BATCH, ranks=8, stage=3)
    assert (sharded["start"], sharded["rollout"]) == (4 * SEVEN.params, 0)
    assert sharded["sync"] == 4 * SEVEN.params / 8 + 4 * HEAD  # its share, and the largest tensor gathered
    assert learner_bytes(SEVEN, TINY_BATCH, ranks=8, stage=2)["sync"] == 4 * SEVEN.params
    for kept in (
        learner_bytes(SEVEN, TINY_BATCH, ranks=8, stage=0),  # DeepSpeed moves nothing at stage 0
        learner_bytes(SEVEN, TINY_BATCH, ranks=8, stage=3, offloads=False),
    ):
        assert kept["learn"] == kept["sync"] == kept["rollout"]


def test_a_value_model_and_a_reference_are_further_models():
    def held_(**changed):
        work = Workload(prompt=1, response=7, mean=4.0, micro_tokens=8, autocast=False, **changed)
        return learner_bytes(SEVEN, work, ranks=4, stage=3)

    plain, critic, reference = held_(), held_(critic=True), held_(reference=True)
    assert critic["learn"] - plain["learn"] == 20 * SEVEN.params / 4 + 0.2e9
    assert reference["learn"] - plain["learn"] == reference["start"] - plain["start"] == 4 * SEVEN.params


def test_checkpointing_keeps_blocks_inputs():
    kept = activation_bytes(SEVEN, Workload(prompt=1, response=999, micro_tokens=1000))
    everything = activation_bytes(SEVEN, Workload(prompt=1, response=999, micro_tokens=1000, checkpointing=False))
    assert everything - kept == pytest.approx(27 * 1000 * 2 * (6 * 3584 + 2 * 32 * 128 + 4 * 18944))


# --- both ----------------------------------------------------------------------------------------


def test_a_shared_gpu_holds_who_sleeps_and_who_is_awake():
    one, learner = engine("int8"), {"start": 30e9, "learn": 50e9, "sync": 5e9, "rollout": 0.0}
    awake = LINEARS + 4 * HEAD + 4.6e9 + 40e9

    def gpu_bytes(placement, **changed):
        layout = Layout(placement=placement, engines=1, tensor_parallel=1, ranks=1, stage=0, **changed)
        return {turn: sum(held.values()) for turn, held in gpu_parts(one, learner, 40e9, layout).items()}

    turns = {"start": 30e9 + 2.5e9, "learn": 50e9 + 2.5e9, "sync": 5.5e9 + awake, "rollout": 0.5e9 + awake}
    assert gpu_bytes("colocated") == pytest.approx(turns)
    assert gpu_bytes("colocated", sleeps=False) == pytest.approx(turns | {"learn": 50.5e9 + awake})
    apart = gpu_bytes("disaggregated")
    assert apart == pytest.approx({"start": 30.5e9, "learn": 50.5e9, "sync": awake, "rollout": awake})
    assert asleep_bytes(one) == CONSTANTS.context + CONSTANTS.graphs


def test_every_rank_of_a_host_loads_the_whole_model():
    loads = host_bytes(SEVEN, TINY_BATCH, ranks=16, stage=3)
    assert loads == 4 * SEVEN.params * 8  # eight of a node's ranks
    alone = host_bytes(SEVEN, TINY_BATCH, ranks=1, stage=0)  # later, states are more than what was loaded
    assert alone == 16 * SEVEN.params + 2 * 2 * SEVEN.params + 2e9
    shares = host_bytes(SEVEN, TINY_BATCH, ranks=16, stage="fsdp")
    assert shares == 8 * 16 * SEVEN.params / 16 + 2 * 2 * SEVEN.params + 2e9


def test_fsdp_holds_shares_and_what_a_pass_gathers():
    def held_(**changed):
        work = Workload(prompt=1, response=7, mean=4.0, micro_tokens=8, autocast=False, **changed)
        return learner_bytes(HALF, work, ranks=4, stage="fsdp")

    kept = activation_bytes(HALF, TINY_BATCH) + 3 * 4 * 151936 * 8
    outside, blocks = HALF.params - HALF.block_params, HALF.block_params
    expected = 16 * HALF.params / 4 + 2 * 4 * outside + TWICE + 4 * 4 * blocks / HALF.layers + kept
    assert held_()["learn"] == pytest.approx(expected, rel=1e-6)
    assert held_()["start"] == HALF.params
    assert held_(critic=True)["learn"] - held_()["learn"] == pytest.approx(4 * HALF.params)
    assert held_(reference=True)["learn"] - held_()["learn"] == pytest.approx(HALF.params)


def test_the_writer_of_a_policy_holds_what_it_says():
    assert save.FILE_BYTES == memory.FILE


def test_ranks_that_share_a_sequence_share_its_activations():
    def held_(each):
        work = Workload(prompt=1000, response=31_000, micro_tokens=4096, sequence_parallel=each)
        return activation_bytes(SEVEN, work)

    assert held_(4) == held_(1) / 4
    assert held_(16) == held_(32), "a micro-batch has that many tokens anyway"


def stages_that_fit(one, work, *, ranks, colocated):
    """Stages with which the learner starts and learns, whatever room engines find."""
    placement = "colocated" if colocated else "disaggregated"
    layouts = [Layout(placement=placement, engines=1, tensor_parallel=1, ranks=ranks, stage=stage) for stage in STAGES]
    problems = {layout.stage: footprint(one, layout, work).problems for layout in layouts}
    learns = ("start takes", "learn takes", "hosts need")
    return [stage for stage, texts in problems.items() if not any(text.startswith(learns) for text in texts)]


def test_what_does_not_fit_is_left_out():
    work = Workload(response=4096)
    assert list(stages_that_fit(engine(shape=HALF), work, ranks=8, colocated=True)) == [0, 1, 2, "fsdp", 3]
    assert list(stages_that_fit(engine(), work, ranks=8, colocated=True)) == [2, "fsdp", 3]
    # 32B: 131 GB on every GPU at the start, however many there are, unless ranks read their shares
    big = engine(shape=SHAPES["Qwen2.5-32B"])
    assert list(stages_that_fit(big, work, ranks=16, colocated=True)) == ["fsdp"]
    assert list(stages_that_fit(big, work, ranks=512, colocated=False)) == ["fsdp"]
    assert list(stages_that_fit(engine(shape=big.shape, gpu=GPUS["b200"]), work, ranks=16, colocated=True)) == [
        "fsdp",
        3,
    ]
    # 72B: eight ranks of a host load 2.3 TB, which not even enough memory on the GPUs would change
    assert host_bytes(SHAPES["Qwen2.5-72B"], work, ranks=64, stage=3) > 2.2e12


# --- adapters -------------------------------------------------------------------------------------------------------

ADAPTERS = 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
"""Parameters of rank 16 on all linears of Qwen2.5-7B."""


@pytest.mark.parametrize(
    ("codes", "held", "base"),
    [
        ("int8", LINEARS, LINEARS + 4 * 2 * HEAD),
        ("nvfp4", LINEARS * 4.5 / 8, LINEARS * 4.5 / 8 + 4 * 2 * HEAD),
        (None, 0, 4 * (LINEARS + 2 * HEAD)),
    ],
)
def test_adapters_hold_the_base_once_and_states_of_their_own_alone(codes, held, base):
    work = Workload(
        prompt=1, response=7, mean=4.0, micro_tokens=8, autocast=False, reference=True, lora_rank=16, lora_codes=codes
    )
    turns = learner_bytes(SEVEN, work, ranks=1, stage="torch")
    assert turns["start"] == turns["sync"] == base + 16 * ADAPTERS  # the reference is the policy itself
    full = learner_bytes(SEVEN, TINY_BATCH, ranks=1, stage="torch")
    assert turns["learn"] < (0.25 if codes else 0.4) * full["learn"]
    assert turns["rollout"] == held  # codes stay
    shared = learner_bytes(SEVEN, work, ranks=8, stage="fsdp")
    assert shared["sync"] == pytest.approx(held + (base - held + 16 * ADAPTERS) / 8)


def test_seven_billion_parameters_with_adapters_fit_on_one_h100_beside_their_engine():
    layout = Layout(placement="colocated", engines=1, tensor_parallel=1, ranks=1, stage="torch")
    full, lora = (
        footprint(engine("int8"), layout, Workload(response=1024, micro_tokens=4096, **changed)).problems
        for changed in ({}, {"lora_rank": 16, "lora_codes": "int8"})
    )
    assert full
    assert not lora
