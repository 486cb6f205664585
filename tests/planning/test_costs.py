"""Roofline and phases against arithmetic done here by hand, in other words than theirs."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from qurl_ray.errors import ConfigError
from qurl_ray.planning.machines import BLOCK_BYTES, GPUS, PLANNED_AS, PRECISIONS, Constants, find_gpu
from qurl_ray.planning.memory import Layout, kv_room, weights_bytes
from qurl_ray.planning.plan import widths
from qurl_ray.planning.shapes import SHAPES
from qurl_ray.planning.speed import EngineRoofline, learn_s, pass_flops, rollout_s, turn_s
from qurl_ray.planning.workload import Workload
from qurl_ray.quant.formats import FORMATS

SEVEN, H100 = SHAPES["Qwen2.5-7B"], GPUS["h100"]
PERFECT = Constants(
    bandwidth=1,
    flops_16=1,
    flops_8=1,
    layer_s=0,
    quantize_s=0,
    operation_s=0,
    sequence_s=0,
    link=1,
    all_reduce_s=0,
    learner_flops=1,
)
LINEARS = 28 * (3584 * 3584 * 2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
HEAD = 152064 * 3584


def engine(precision="bf16", **changed):
    return EngineRoofline(**({"shape": SEVEN, "gpu": H100, "precision": precision, "constants": PERFECT} | changed))


# --- a decode step -------------------------------------------------------------------------------


def test_one_sequence_reads_all_weights_and_its_own_keys():
    read = 2 * LINEARS + 2 * HEAD + 1000 * 57344
    assert engine().decode_s(1, 1000) == pytest.approx(read / 3.35e12)
    assert engine("fp8").decode_s(1, 1000) == pytest.approx((read - LINEARS) / 3.35e12)


def test_a_thousand_sequences_multiply():
    products = 2 * 1000 * (LINEARS + HEAD) / 989e12
    assert engine().decode_s(1000, 0) == pytest.approx(products)
    eight_bit = 2 * 1000 * (LINEARS / 1979e12 + HEAD / 989e12)
    assert engine("fp8").decode_s(1000, 0) == pytest.approx(eight_bit)


def test_overhead_is_counted_per_layer_and_sequence():
    c = Constants()
    without = EngineRoofline(
        shape=SEVEN, gpu=H100, precision="fp8", constants=Constants(layer_s=0, quantize_s=0, sequence_s=0)
    )
    added = engine("fp8", constants=c).decode_s(10, 500) - without.decode_s(10, 500)
    assert added == pytest.approx(28 * (c.layer_s + c.quantize_s) + 10 * c.sequence_s)


INPUTS = 3584 + 3584 + 3584 + 18944
"""Inputs of a layer's four linears: q/k/v, output, gate/up, down."""


def test_vllm_quantizes_activations_with_one_more_operation_a_linear():
    quick = {"constants": Constants(**_only(operation_s=2e-6))}
    added = engine("int8", **quick).decode_s(100, 0) - engine("fp8", **quick).decode_s(100, 0)
    # FP8 is fused; INT8 reads two bytes of each input and writes one
    assert added == pytest.approx(28 * (4 * 2e-6 + 100 * INPUTS * 3 / 3.35e12))


REVIEWED = {
    "bf16": ({"precision": "bf16"}, (6.2, 9.2, 19.3, 37.3)),
    "8 bits, fused": ({"precision": "fp8"}, (4.1, 7.2, 17.4, 33.4)),
    "INT8, not fused": ({"precision": "int8"}, (4.1, 7.2, 17.4, 33.4)),
}
"""Milliseconds of a decode step of 7B on an H100 with CUDA graphs, at 1, 64, 256 and 512 sequences of some 2000 tokens:
the roofline of a review, made independently."""


@pytest.mark.parametrize("name", REVIEWED)
def test_decode_steps_are_those_of_an_independent_roofline(name):
    settings, milliseconds = REVIEWED[name]
    found = [1e3 * engine(**settings, constants=Constants()).decode_s(count, 2048) for count in (1, 64, 256, 512)]
    assert found == pytest.approx(milliseconds, rel=0.06)


def test_tensor_parallel_engines_share_reads_and_pay_all_reduces():
    alone, pair = engine(), engine(tensor_parallel=2, constants=Constants(**_only(all_reduce_s=1e-5)))
    sent = 28 * 2 * (1e-5 + 8 * 3584 * 2 * 2 * 0.5 / 450e9)
    assert pair.decode_s(8, 700) == pytest.approx(alone.decode_s(8, 700) / 2 + sent)


def _only(**changed):
    return {name: getattr(PERFECT, name) for name in PERFECT.__dataclass_fields__} | changed


def test_key_heads_are_not_shared_beyond_their_number():
    keys = [engine(tensor_parallel=width).parts(8, 1000)["keys and values"] for width in (1, 4, 8)]
    assert keys[1] == pytest.approx(keys[0] / 4) == keys[2]


@pytest.mark.parametrize(("precision", "bits"), [("int4", 4.25), ("nvfp4", 4.5), ("mxfp4", 4.25), ("mxfp8", 8.25)])
def test_formats_of_weights_alone_read_their_bits_and_multiply_in_bfloat16(precision, bits):
    head = 2 * SEVEN.head_params / 3.35e12
    assert engine(precision).decode_s(1, 0) == pytest.approx(head + SEVEN.block_params * bits / 8 / 3.35e12)
    assert weights_bytes(engine(precision)) == SEVEN.block_params * bits / 8 + 2 * (SEVEN.params - SEVEN.block_params)
    many = engine(precision).decode_s(4000, 0)
    assert many == pytest.approx(engine("bf16").decode_s(4000, 0))
    real = EngineRoofline(shape=SEVEN, gpu=H100, precision=precision)  # no activation is quantized
    full = replace(real, precision="bf16")
    assert real.parts(8, 100)["overhead"] == full.parts(8, 100)["overhead"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_formats_bits_are_those_of_its_arrays(name):
    arrays = FORMATS[name].parts((4096, 4096))
    assert sum(a.dtype.itemsize * math.prod(a.shape) for a in arrays) / 4096**2 == pytest.approx(
        BLOCK_BYTES[PLANNED_AS[name]], rel=2e-3
    )


def test_what_a_gpu_does_not_multiply_it_reads_as_codes():
    a100 = {"gpu": GPUS["a100"]}
    assert engine("fp8", **a100).decode_s(1, 0) == pytest.approx(engine("int8", **a100).decode_s(1, 0), rel=1e-3)
    assert engine("fp8", **a100).decode_s(4000, 0) == engine("bf16", **a100).decode_s(4000, 0)  # by products
    assert engine("int8", **a100).decode_s(4000, 0) < engine("bf16", **a100).decode_s(4000, 0)


def test_a_prefill_is_two_flops_a_weight_and_half_of_attention():
    scores = 28 * 28 * 128 * (2 * 2 * 512 * 513 / 2)  # layers, heads, width; two products of T(T+1)/2 pairs
    assert engine().prefill_s(3, 512) == pytest.approx(3 * (2 * LINEARS * 512 + scores) / 989e12, rel=1e-3)


def test_widths_divide_heads_and_stay_in_a_node():
    assert widths(SEVEN, 8) == [1, 2, 4]  # 28 heads
    assert widths(SHAPES["Qwen3-8B"], 100) == [1, 2, 4, 8]
    assert widths(SHAPES["SmolLM2-135M"], 8) == [1]  # 9 heads


# --- the distribution of lengths -----------------------------------------------------------------

lengths = st.builds(
    lambda response, share: Workload(response=response, mean=max(1.0, response * share)),
    st.integers(2, 30_000),
    st.floats(0.05, 0.999) | st.just(1.0),  # between these, a spread of 1e-16 is lost in rounding
)


@settings(max_examples=60, deadline=None)
@given(lengths)
def test_moments_are_those_of_a_power_of_a_uniform_number(work):
    k = work.spread
    assert quad(lambda u: work.response * u**k, 0, 1)[0] == pytest.approx(work.answer, rel=1e-6)
    assert quad(lambda u: (work.response * u**k) ** 2, 0, 1)[0] == pytest.approx(work.square, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(lengths, st.floats(0, 1))
def test_running_is_the_share_of_longer_answers(work, share):
    drawn = share * work.response
    longer = np.mean(work.response * np.linspace(0, 1, 20_001) ** work.spread > drawn)
    assert work.running(drawn) == pytest.approx(longer, abs=1e-3)


def test_the_longest_of_many_answers_nears_the_limit():
    work = Workload(response=8000, mean=2000)
    assert work.longest(1) == pytest.approx(2000)
    assert work.longest(3) == pytest.approx(4000)  # 8000 · 3 / (3 + 3)
    assert work.longest(1e9) == pytest.approx(8000)


def test_rounds_refill_what_dynamic_sampling_drops():
    assert Workload(prompts=64, samples=8).rounds == [512]
    third = Workload(prompts=90, samples=1, kept=1 / 3).rounds
    assert third == pytest.approx([90, 90, 90])
    assert sum(Workload(prompts=100, samples=4, kept=0.8).rounds) == pytest.approx(500, rel=0.01)
    assert len(Workload(prompts=100, kept=0.01).rounds) == 10


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prompts": 0}, "prompts is 0"),
        ({"response": -5}, "response is -5"),
        ({"mean": 9000.0}, "mean answer of 9000"),
        ({"kept": 0.0}, "kept share of 0"),
        ({"kept": math.nan}, "kept share of nan"),
        ({"mean": math.nan}, "mean answer of nan"),
        ({"staleness": -1}, "staleness is -1"),
        ({"updates": 200}, "200 updates"),
    ],
)
def test_nonsense_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        Workload(**settings)


# --- rollouts ------------------------------------------------------------------------------------


class Even:
    """A decode step takes a second and one more per row; a sequence holds a byte per token."""

    def __init__(self, row=0.0):
        self.row = row

    def decode_s(self, batch, context):
        return 1.0 + self.row * batch

    def prefill_s(self, prompts, length):
        return 0.0

    def kv_of(self, context):
        return context


def test_answers_alike_take_as_many_steps_as_they_have_tokens():
    work = Workload(response=240, mean=240.0)
    assert rollout_s(Even(), work, samples=8, slots=8) == pytest.approx(240)
    assert rollout_s(Even(), work, samples=80, slots=8) == pytest.approx(10 * 240)  # ten waves


def test_a_batch_drains_until_its_longest_answer_ends():
    work = Workload(response=240, mean=120.0)
    assert rollout_s(Even(), work, samples=1000, slots=1000) == pytest.approx(240, rel=0.01)
    assert rollout_s(Even(), work, samples=1, slots=8) == pytest.approx(120, rel=0.1)


def one_by_one(work, samples, slots, room, row, seed):
    """The same as an event after the other, for drawn lengths: first come, first served; the youngest make room."""
    lengths = np.maximum(1, work.response * np.random.default_rng(seed).random(samples) ** work.spread)
    waiting, running, seconds = [(0, length) for length in lengths], [], 0.0
    while waiting or running:
        while len(running) > 1 and sum(work.prompt + age for age, _ in running) > room:
            youngest = min(running, key=lambda sequence: sequence[0])
            running.remove(youngest)
            waiting.append(youngest)
        held = sum(work.prompt + age for age, _ in running)
        while waiting and len(running) < slots and held + work.prompt + waiting[-1][0] < room:
            running.append(waiting.pop())
            held += work.prompt + running[-1][0]
        step = min(8, min(length - age for age, length in running))
        seconds += step * (1 + row * len(running))
        running = [(age + step, length) for age, length in running if length - age > step]
    return seconds


@pytest.mark.parametrize(
    ("share", "samples", "slots", "room", "row"),
    [
        (0.5, 60, 20, 1e9, 0.0),
        (0.25, 96, 20, 1e9, 0.1),
        (0.25, 60, 45, 1e9, 0.0),
        (0.5, 64, 64, 16_000, 0.05),
        (0.25, 120, 120, 12_000, 0.0),
        (1.0, 40, 40, 15_000, 0.1),
    ],
)
def test_classes_of_answers_take_as_long_as_single_ones(share, samples, slots, room, row):
    work = Workload(prompt=100, response=960, mean=960 * share)
    single = np.mean([one_by_one(work, samples, slots, room, row, seed) for seed in range(12)])
    assert rollout_s(Even(row), work, samples, slots, room) == pytest.approx(single, rel=0.1)


@settings(max_examples=40, deadline=None)
@given(lengths, st.integers(1, 2000), st.sampled_from(PRECISIONS), st.sampled_from(["h100", "a100", "l40s"]))
def test_fewer_answers_never_take_longer(work, samples, precision, gpu):
    one = EngineRoofline(shape=SHAPES["Qwen2.5-0.5B"], gpu=GPUS[gpu], precision=precision)
    few, many = (rollout_s(one, work, count, 256, kv_room(one)) for count in (samples, samples + 1 + samples // 3))
    assert few <= many * 1.001


# --- learner -------------------------------------------------------------------------------------


def test_an_update_without_recomputation_is_six_flops_a_weight_and_token():
    work = Workload(prompts=64, samples=1, prompt=1, response=1, mean=1.0, updates=1, checkpointing=False)
    compute = 128 * 3 * (2 * (LINEARS + HEAD) + 2 * 28 * 28 * 128 * 2) / 989e12
    moments = 28 * SEVEN.params / 3.35e12
    assert learn_s(SEVEN, H100, work, ranks=1, stage=0, c=PERFECT) == pytest.approx(compute + moments, rel=1e-6)


def test_scoring_and_recomputation_are_further_passes():
    def seconds(**changed):
        work = Workload(prompts=64, samples=8, response=2048, **({"updates": 1} | changed))
        learned = learn_s(SEVEN, H100, work, ranks=1, stage=0, c=PERFECT)
        return learned - work.updates * 28 * SEVEN.params / 3.35e12

    one = seconds(checkpointing=False) / 3
    assert seconds() == pytest.approx(4 * one)
    assert seconds(updates=4) == pytest.approx((4 + 3 / 4) * one)
    assert seconds(reference=True) == pytest.approx(5 * one)
    assert seconds(critic=True) == pytest.approx((8 + 1) * one)


def test_ranks_across_nodes_send_through_the_network():
    work = Workload(prompts=512, samples=1, prompt=1, response=1, mean=1.0, updates=1, micro_tokens=10_000)
    slow = learn_s(SEVEN, H100, work, ranks=16, stage=1, c=PERFECT)
    assert slow == pytest.approx(8 * SEVEN.params / 50e9 + 28 * SEVEN.params / 16 / 3.35e12)


def test_a_token_attends_to_half_of_its_sequence():
    assert pass_flops(SEVEN, 1000) - pass_flops(SEVEN, 0) == pytest.approx(28 * 28 * 128 * 4 * 1000 / 2)


def test_taking_turns_moves_states_and_weights_twice():
    layout = Layout(placement="colocated", engines=8, tensor_parallel=1, ranks=8, stage=3)
    sharded = turn_s(engine("int8"), layout, Workload())
    assert sharded == pytest.approx(2 * (20 * SEVEN.params / 8 + LINEARS + 4 * HEAD) / 64e9)
    assert turn_s(engine("int8"), replace(layout, stage=0), Workload()) == pytest.approx(
        2 * (LINEARS + 4 * HEAD) / 64e9
    )


def test_an_unknown_gpu_names_the_nearest_and_a_cpu_is_not_planned():
    assert find_gpu("H100") is H100
    with pytest.raises(ConfigError, match="did you mean 'h200'"):
        find_gpu("h200x")
    with pytest.raises(ConfigError, match="knows no CPU"):
        find_gpu("cpu")
