import os

import pytest
import torch

from qurl_ray.errors import ConfigError
from qurl_ray.planning.measure import Line, Machine, MeasuredEngine, measure, measure_host
from qurl_ray.planning.shapes import SHAPES, Shape
from qurl_ray.planning.workload import Workload

ENGINE = MeasuredEngine(steps=((1.0, 0.1), (9.0, 0.5)), prefill=Line(fixed=0.2, each=0.01))


def test_a_line_goes_through_two_timings_and_nothing_is_negative():
    assert Line.through((10, 3.0), (20, 5.0)) == Line(fixed=1.0, each=0.2)
    assert Line.through((10, 5.0), (20, 3.0)) == Line(fixed=5.0, each=0.0)  # noise
    assert Line.through((10, 1.0), (20, 5.0)).fixed == 0.0
    assert Line.through((10, 2.0), (10, 2.0)).at(5) == pytest.approx(1.0)


def test_decode_steps_lie_on_the_line_of_two_that_were_timed():
    assert ENGINE.decode_s(5, 100) == pytest.approx(0.3)
    assert ENGINE.decode_s(19, 100) == pytest.approx(1.0)  # as the last two go on
    assert ENGINE.prefill_s(4, 10) == pytest.approx(0.6)


def test_phases_are_counted_from_what_was_timed():
    machine = Machine(
        engines={"int8": ENGINE},
        score=Line(fixed=1.0, each=0.0),
        update=Line(fixed=2.0, each=0.1),
        sync={"int8": 0.7},
        message=0.01,
        seconds=1.0,
    )
    work = Workload(prompts=9, samples=1, prompt=10, response=4, mean=4.0, updates=3)
    phases = machine.phases(work, "int8")
    # nine alike answers of four tokens; two of three mini-batches are scored; 9 · 14 tokens in three updates
    assert phases["rollout"] == pytest.approx(0.2 + 0.01 * 90 + 4 * 0.5 + 9 * 0.01, rel=0.01)
    assert phases["logprob"] == pytest.approx(2.0)
    assert phases["update"] == pytest.approx(3 * (2.0 + 0.1 * 42))
    assert phases["sync"] == 0.7


def test_engine_and_learner_of_a_shape_are_timed():
    shape = Shape(
        name="small", hidden=64, layers=1, heads=2, kv_heads=1, head_dim=32, intermediate=64, vocab=32, tied=True
    )
    work = Workload(prompts=2, samples=2, prompt=4, response=2, mean=2.0, updates=2, slots=4, checkpointing=False)
    threads = torch.get_num_threads()
    machine = measure(shape, work)
    assert torch.get_num_threads() == threads
    for format_name in ("none", "int8"):
        assert all(seconds > 0 for seconds in machine.phases(work, format_name).values())


def test_rates_of_a_host_are_of_bytes_and_seconds():
    """A rate in milliseconds, megabytes or elements of another size would be far off what memory can do."""
    host = measure_host()
    for name in ("quantize", "fingerprint", "compare", "copy", "convert"):
        assert 0.1e9 < getattr(host, name) < 200e9, name
    assert host.pack > 1e6  # far more where the kernel takes codes as they are, as with VNNI
    assert host.threads == os.cpu_count()


def test_a_model_that_would_take_minutes_is_refused():
    with pytest.raises(ConfigError, match=r"8\.2 B parameters"):
        measure(SHAPES["Qwen3-8B"], Workload())
