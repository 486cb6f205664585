"""What a session announces of a step."""

import asyncio
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from qurl_ray.config import load_config
from qurl_ray.errors import QurlError
from qurl_ray.training.coordinator.collect import CertificateAnswers, Collected
from qurl_ray.training.coordinator.events import EventBuffer
from qurl_ray.training.coordinator.session import Session, _Step
from tests.training.coordinator.test_figures import RESULT


def announced(shares, *settings):
    """Messages on steps of which these shares of the answers were truncated."""
    messages = []
    session = Session.__new__(Session)
    session._config, session._endless = load_config(None, list(settings)), False
    session._events = SimpleNamespace(warn=lambda step, message: messages.append((step, message)))
    for step, share in enumerate(shares, start=1):
        session._warn_of_no_ends(step, {"rollout/truncated_share": share})
    return messages


def test_answers_of_the_first_steps_that_do_not_end_are_announced_once_with_the_cause():
    ((step, message),) = announced([0.5, 0.99, 1.0], "rollout.max_new_tokens=7")
    assert step == 2
    assert message.startswith("99% of the answers do not end within rollout.max_new_tokens=7: ")
    assert "eos_token_id in generation_config.json" in message
    assert "turn_tokens" not in message
    settings = ("environment.type=calculator", "environment.turn_tokens=5")
    ((_, message),) = announced([1.0], *settings)
    assert "or a turn within environment.turn_tokens=5" in message


def test_a_step_whose_answers_do_not_end_is_announced():
    config, events = load_config(None, ["sync.probe_tokens=0"]), EventBuffer()
    fleet = SimpleNamespace(those=lambda *_: [], counts=SimpleNamespace(deaths=0, repeated=0, hedged=0))
    result = replace(RESULT, seconds={"logprob": 0.0, "update": 0.0})

    async def finish():
        session = Session(config, None, fleet, events, asyncio.Event())
        step = SimpleNamespace(
            collected=Collected(), reported=([result], {"rollout/truncated_share": 1.0}), certificate={}
        )
        session._steps[1] = step
        await session._finish(1, [({}, {})])

    asyncio.run(finish())
    assert [event.message[:40] for event in events.take() if event.kind == "warning"] == [
        "100% of the answers do not end within ro"
    ]


class Answers:
    """Has one answer to each problem. Full precision is always right; a coarse format never."""

    held_out_sets = ()

    def __init__(self, config) -> None:
        self._full = True

    def restore(self, state) -> None:
        """Do nothing."""

    async def certificate_answers(self, step):
        reward, self._full = float(self._full) * 3, not self._full
        return CertificateAnswers(rewards_PG=np.full((64, 1), reward), token_ids=[np.arange(3)] * 64, groups=[])


def certified(session, step):
    """Make a certificate, and return its event and sentence."""

    async def draw():
        for name in ("none", "int4"):
            assert await session.certify(step, 0, name, 0) == []
        await session._finish(step, [({}, {"certificate/gradient_cosine": 0.5, "certificate/gradient_ratio": 2.0})])

    result = replace(RESULT, seconds={"logprob": 0.0, "update": 0.0})
    session._steps[step] = _Step(
        shares=None, collected=Collected(), reported=([result], {"rollout/truncated_share": 0.0})
    )
    asyncio.run(draw())
    told = session._events.take()
    (event,) = (event for event in told if event.kind == "step")
    (sentence,) = (event.message for event in told if event.message.startswith("certificate: at"))
    return event.values, sentence


def test_a_certificate_of_a_coarse_format_says_so_and_the_guard_acts_until_full_precision():
    settings = ["guard.cost_max=0.3", "guard.patience=1", "guard.window=1", "evaluation.certificate.every=1"]
    config, events = load_config(None, [*settings, "sync.probe_tokens=0", "guard.trips=1"]), EventBuffer()
    fleet = SimpleNamespace(those=lambda *_: [], counts=SimpleNamespace(deaths=0, repeated=0, hedged=0))

    def session(state=None) -> Session:
        return Session(config, Answers(config), fleet, events, asyncio.Event(), state=state)

    one = session()
    values, sentence = certified(one, 1)
    assert (values["certificate/cost"], values["certificate/pairs"]) == (1.0, 64)  # 3 counts as 1, the range's end
    assert values["certificate/cost_least"] > 0.4
    assert values["certificate/gradient_ratio"] == 2.0
    assert "at most 1 of reward" in sentence
    assert "in this one 1 [1, 1]" in sentence
    healthy = {"mismatch/kl": 0.01, "reward/mean": 0.5}
    bounds = one._costs.bounds(width=1.0)
    assert [int(one._guard.judge(step, healthy | bounds).level) for step in (2, 3, 4)] == [1, 2, 3]
    assert one._guard.judge(5, healthy).messages == ()  # in full precision, nothing is certified
    resumed = session(json.loads(json.dumps(one.state(1))))
    assert certified(resumed, 2)[0]["certificate/pairs"] == 128
    assert certified(one, 2)[0]["certificate/cost_least"] == resumed._costs.bounds(width=1.0)["certificate/cost_least"]


def steps_until_the_end(norms, *settings):
    """Number of the step that ends the run; None if none does."""
    session = Session.__new__(Session)
    session._config, session._lost_steps = load_config(None, list(settings)), 0
    for number, norm in enumerate(norms, start=1):
        lost = 0 if norm is None else 2 - int(math.isfinite(norm))
        result = replace(RESULT, grad_norm=math.nan if norm is None else norm, skipped_updates=lost)
        try:
            session._check_gradients(number, result)
        except QurlError:
            return number
    return None


NAN = math.nan


@pytest.mark.parametrize(
    ("norms", "settings", "end"),
    [
        ([NAN] * 12, ["steps=100"], 10),
        ([NAN] * 9 + [1.0] + [NAN] * 9, ["steps=100"], None),
        ([1.0, NAN, None, NAN, None] + [NAN] * 9, ["steps=100"], 13),  # None: there was nothing to learn from
        ([NAN] * 3, ["steps=3"], 3),
        ([NAN] * 3, ["steps=3", "learner.compute=float16"], None),
    ],
)
def test_gradients_that_are_never_finite_end_the_run(norms, settings, end):
    assert steps_until_the_end(norms, *settings) == end


@pytest.mark.parametrize(
    ("shares", "settings"),
    [([0.9] * 3, []), ([0.0, 0.0, 0.0, 1.0], []), ([1.0], ["rollout.ignore_eos=true"])],
    ids=["some end", "a later step", "as asked for"],
)
def test_other_truncated_answers_are_not_announced(shares, settings):
    assert announced(shares, *settings) == []
