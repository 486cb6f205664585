"""The usual gap of probes: no alarm from noise, an alarm within three probes of a fault, state that survives.

The gaps are those of real probes, of SmolLM2-135M in FP8 with an engine in bfloat16 (benchmarks/probe.py).
"""

import json
from pathlib import Path

import numpy as np
import pytest

from qurl_ray.weights.floor import ProbeFloor

ANSWERS = {
    name: np.array(gaps)
    for name, gaps in json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "probe.json").read_text())[
        "answers"
    ].items()
}
"""Mean gap of each answer of 16 tokens in nats, by what is wrong."""
ENGINE = "worker 0, fp8 on a GPU"
FEW, MANY = 512, 8192
"""Tokens of a probe, on a CPU and on a GPU (sync.probe_tokens)."""


def probes(what: str, count: int, seed: int, tokens: int = FEW) -> list[float]:
    """Mean gaps of probes: each of answers drawn from those that were recorded."""
    drawn = np.random.default_rng(seed).choice(ANSWERS[what], (count, tokens // 16))
    return drawn.mean(axis=1).tolist()


def calibrated(seed: int, tokens: int = FEW) -> ProbeFloor:
    floor = ProbeFloor()
    for gap in probes("nothing", 40, seed, tokens):
        assert not floor.add(ENGINE, gap)
    assert floor.known(ENGINE)
    return floor


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_the_noise_of_bfloat16_raises_no_alarm_in_a_thousand_syncs(seed, tokens):
    floor = ProbeFloor()
    alarms = sum(floor.add(ENGINE, gap) for gap in probes("nothing", 1000, seed, tokens))
    assert alarms == 0
    assert floor.usual(ENGINE) == pytest.approx(ANSWERS["nothing"].mean(), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("fault", "tokens"),
    [("one layer", FEW), ("powers of two", FEW), ("powers of two", MANY), ("one scale, twice as large", MANY)],
)
def test_a_fault_is_noticed_within_three_probes_and_confirmed(fault, tokens, seed):
    floor = calibrated(seed, tokens)
    first, *again = probes(fault, 4, seed, tokens)
    assert any(floor.add(ENGINE, gap) for gap in (first, *again[:2]))
    assert floor.persists(ENGINE, again[-1])
    assert not floor.known(ENGINE)  # what is usual is learned again


def test_an_alarm_that_the_next_probe_does_not_confirm_changes_nothing():
    floor = calibrated(0)
    usual = floor.usual(ENGINE)
    assert floor.add(ENGINE, 10 * usual)
    assert not floor.persists(ENGINE, usual)
    assert floor.usual(ENGINE) == usual
    assert not floor.add(ENGINE, usual)


def test_engines_without_any_gap_are_known_at_once_and_watched():
    floor = ProbeFloor()
    assert not floor.known(ENGINE)
    assert not floor.add(ENGINE, 0.0)
    assert floor.known(ENGINE)
    assert not any(floor.add(ENGINE, 1e-4) for _ in range(100))
    assert floor.add(ENGINE, 0.1)


def test_a_slow_drift_is_followed():
    floor = calibrated(1)
    noise = np.array(probes("nothing", 1000, 2))
    assert not any(floor.add(ENGINE, gap * 4 ** (i / 1000)) for i, gap in enumerate(noise))


def test_each_engine_has_its_own_floor_and_the_state_keeps_them():
    floor = calibrated(2)
    floor.add("worker 1, fp8 on a GPU", 5.0)
    floor.add(ENGINE, 1.3 * floor.usual(ENGINE))
    again = ProbeFloor.of(json.loads(json.dumps(floor.state())))
    assert again == floor
    assert again.excess[ENGINE] > 0
    assert not again.known("worker 1, fp8 on a GPU")
