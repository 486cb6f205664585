"""The numbers of an event under the names that all trackers show."""

import re

from qurl_ray.report.catalog import is_quantized_evaluation
from qurl_ray.runs.values import flatten, number
from qurl_ray.types import Event


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


def gauge_name(name: str) -> str:
    """Return a metric's name as Prometheus takes it; Ray adds `ray_`.

    Example:
        gauge_name("mismatch/kl") == "qurl_mismatch_kl"
    """
    return "qurl_" + re.sub(r"\W", "_", name)
