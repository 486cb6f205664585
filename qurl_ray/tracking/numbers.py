"""The numbers of an event under the names that all trackers show."""

import re

from qurl_ray.report.catalog import is_quantized_evaluation
from qurl_ray.runs.values import flatten, number
from qurl_ray.types import Event

_HELD_OUT = {
    "full": "eval/accuracy",
    "full/low": "eval/low",
    "full/high": "eval/high",
    "full/reward": "eval/reward",
    "full/reward/low": "eval/reward_low",
    "full/reward/high": "eval/reward_high",
    "rollout": "eval_rollout/accuracy",
    "rollout/low": "eval_rollout/low",
    "rollout/high": "eval_rollout/high",
    "rollout/reward": "eval_rollout/reward",
    "rollout/reward/low": "eval_rollout/reward_low",
    "rollout/reward/high": "eval_rollout/reward_high",
}
"""Numbers that the held-out charts show, by the report's own keys."""


def event_numbers(event: Event) -> dict[str, float]:
    """Return the numbers of a step, an evaluation or a summary by name; nested names are joined by /. NaN stays NaN.

    Evaluations of the policy as rolled out are named `eval_rollout/…` instead of `eval/…`, since one step may have
    both; figures of the summary begin with `summary/`.
    """
    values = event.values
    if event.kind == "evaluation" and is_quantized_evaluation(event.message):
        values = {re.sub("^eval/", "eval_rollout/", key): value for key, value in values.items()}
    prefix = "summary/" if event.kind == "summary" else ""
    numbers = ((f"{prefix}{key}", number(value)) for key, value in flatten(values, "/"))
    return {key: value for key, value in numbers if value is not None}


def series_name(key: str) -> str:
    """Return the name of the number that the report's charts show under this key."""
    return _HELD_OUT.get(key, key)


def gauge_name(name: str) -> str:
    """Return a metric's name as Prometheus takes it; Ray adds `ray_`.

    Example:
        gauge_name("mismatch/kl") == "qurl_mismatch_kl"
    """
    return "qurl_" + re.sub(r"\W", "_", name)
