"""What a session announces of a step."""

from types import SimpleNamespace

import pytest

from qurl_ray.config import load_config
from qurl_ray.loop.coordinator.session import Session


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


@pytest.mark.parametrize(
    ("shares", "settings"),
    [([0.9] * 3, []), ([0.0, 0.0, 0.0, 1.0], []), ([1.0], ["rollout.ignore_eos=true"])],
    ids=["some end", "a later step", "as asked for"],
)
def test_other_truncated_answers_are_not_announced(shares, settings):
    assert announced(shares, *settings) == []
