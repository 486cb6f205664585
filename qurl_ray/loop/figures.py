"""The figures of a step, from its rollouts and its updates. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np

from qurl_ray.learner.protocol import StepResult
from qurl_ray.loop.collect import Collected
from qurl_ray.rl.diagnostics import policy_metrics
from qurl_ray.rl.reduce import merge
from qurl_ray.rl.value import value_metrics


def step_figures(
    step: int, collected: Collected, results: Sequence[StepResult], drawn_at: Mapping[int, int]
) -> dict[str, float]:
    """Of a step's rollouts and updates.

    Args:
        results: of all ranks.
        drawn_at: by version of the weights, steps that they have learned from.
    """
    sums, rewards = merge(result.sums for result in results), np.array(collected.rewards)
    values = {
        "reward/mean": float(rewards.mean()) if rewards.size else 0.0,
        "reward/solved_share": float((rewards > 0.5).mean()) if rewards.size else 0.0,
        "reward/failed": sum(collected.failed.values()),
        "rollout/samples": collected.samples,
        "rollout/trained_samples": sum(len(group) for group in collected.groups),
        "rollout/tokens": collected.tokens,
        "rollout/tokens_per_second": collected.tokens / collected.rollout_seconds,
        "rollout/mean_length": float(np.mean(collected.lengths)),
        "rollout/truncated_share": collected.truncated / collected.samples,
        "rollout/garbage_share": collected.garbage / collected.tokens,
        "rollout/uniform_groups": collected.uniform_groups / collected.all_groups,
        "rollout/rounds": collected.rounds,
        "loss": sums.get("loss", 0.0),
        "lr": results[0].lr,
        "grad_norm": results[0].grad_norm,
        "skipped_updates": results[0].skipped_updates,
    }
    values |= _staleness(step, collected, drawn_at)
    return values | ((policy_metrics(sums) | value_metrics(sums)) if sums else {})


def _staleness(step: int, collected: Collected, drawn_at: Mapping[int, int]) -> dict[str, float]:
    """Steps that the learner was ahead of the weights that drew its tokens."""
    versions = [s.versions for group in collected.groups for s in group]
    if not versions:
        return {}
    found, counts = np.unique(np.concatenate(versions), return_counts=True)
    lags = np.array([step - 1 - drawn_at[int(version)] for version in found])
    return {
        "rollout/staleness_mean": float((lags * counts).sum() / counts.sum()),
        "rollout/staleness_max": float(lags.max()),
    }
