"""Figures of a step, from its rollouts and its updates, and figures of an evaluation. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qurl_ray.actors.trajectories import Played
from qurl_ray.environments.protocol import FAILURES
from qurl_ray.evaluation.statistics import SOLVED, accuracy_with_interval, is_binary, reward_with_interval
from qurl_ray.learner.protocol import StepResult
from qurl_ray.rl.diagnostics import policy_metrics
from qurl_ray.rl.reduce import merge
from qurl_ray.rl.value import value_metrics
from qurl_ray.training.coordinator.collect import Collected
from qurl_ray.types import Verdict


def step_figures(
    step: int, collected: Collected, results: Sequence[StepResult], drawn_at: Mapping[int, int]
) -> dict[str, float]:
    """Figures of a step's rollouts and updates.

    Args:
        results: updates of all ranks.
        drawn_at: number of steps that each weight version has learned from, by version.
    """
    sums, rewards = merge(result.sums for result in results), np.array(collected.rewards)
    values = {
        "reward/mean": float(rewards.mean()) if rewards.size else 0.0,
        "reward/solved_share": float((rewards > SOLVED).mean()) if rewards.size else 0.0,
        "reward/failed": sum(collected.failed.values()),
        "rollout/samples": collected.samples,
        "rollout/trained_samples": sum(len(group) for group in collected.groups),
        "rollout/tokens": collected.tokens,
        "rollout/tokens_per_second": collected.tokens / collected.rollout_seconds,
        "rollout/mean_length": float(np.mean(collected.lengths)),
        "rollout/truncated_share": collected.truncated / collected.samples,
        "rollout/garbage_share": collected.garbage / max(1, collected.tokens),
        "rollout/uniform_groups": collected.uniform_groups / collected.all_groups,
        "rollout/rounds": collected.rounds,
        "loss": sums.get("loss", 0.0),
        "lr": results[0].lr,
        "grad_norm": results[0].grad_norm,
        "skipped_updates": results[0].skipped_updates,
    }
    if collected.drafted:
        values["rollout/draft_agreement"] = collected.agreed / collected.drafted
        values["rollout/tokens_per_pass"] = collected.tokens / (collected.tokens - collected.agreed)
    versions = [s.versions if s.mask is None else s.versions[s.mask] for group in collected.groups for s in group]
    if versions:
        drawn_by, counts = np.unique(np.concatenate(versions), return_counts=True)
        lags = np.array([step - 1 - drawn_at[int(version)] for version in drawn_by])  # steps ahead of these weights
        values["rollout/staleness_mean"] = float((lags * counts).sum() / counts.sum())
        values["rollout/staleness_max"] = float(lags.max())
    values |= environment_figures(collected.played)
    return values | ((policy_metrics(sums) | value_metrics(sums)) if sums else {})


def environment_figures(played: Sequence[Played]) -> dict[str, float]:
    """Figures of trajectories with an environment; none without."""
    if not played:
        return {}
    replies = [reply for trajectory in played for reply in trajectory.said]
    calls, seconds = sum(reply.calls for reply in replies), sum(trajectory.seconds for trajectory in played)
    failed = Counter(trajectory.failure.kind for trajectory in played if trajectory.failure)
    return {
        "environment/turns": sum(trajectory.turns for trajectory in played) / len(played),
        "environment/new_rows": sum(len(trajectory.completion.rows) for trajectory in played),
        "environment/calls": calls / len(played),
        "environment/failed_calls": sum(reply.failed_calls for reply in replies) / max(1, calls),
        "environment/seconds": sum(reply.seconds for reply in replies) / len(played),
        "environment/waiting": sum(reply.waited for reply in replies) / seconds if seconds else 0.0,
        "environment/replays": sum(trajectory.replays for trajectory in played),
        "environment/failed": failed.total(),
    } | {f"environment/failed_{kind}": failed[kind] for kind in FAILURES if failed[kind]}


def evaluation_figures(verdicts: Sequence[Verdict], sets: Sequence[str] = ()) -> dict[str, Any]:
    """Figures of the verdicts on the held-out problems, in their order. A failed reward counts as 0.

    `outcomes` and, unless every reward is 0 or 1, `rewards` are problem by problem, for paired tests.

    Args:
        sets: name of each problem's set, if there are several; their figures are `eval/<name>/…`.
    """
    rewards = [verdict.reward for verdict in verdicts]
    values: dict[str, Any] = _estimates("eval", rewards) | {
        "eval/problems": len(verdicts),
        "eval/failed": sum(verdict.status != "ok" for verdict in verdicts),
        "outcomes": "".join("01"[reward > SOLVED] for reward in rewards),
    }
    for name in filter(None, dict.fromkeys(sets)):
        values |= _estimates(f"eval/{name}", [r for r, of in zip(rewards, sets, strict=True) if of == name])
    return values if is_binary(rewards) else values | {"rewards": rewards}


def _estimates(prefix: str, rewards: Sequence[float]) -> dict[str, float]:
    mean, share = reward_with_interval(rewards), accuracy_with_interval([reward > SOLVED for reward in rewards])
    return {
        f"{prefix}/reward": mean.value,
        f"{prefix}/reward_low": mean.low,
        f"{prefix}/reward_high": mean.high,
        f"{prefix}/accuracy": share.value,
        f"{prefix}/low": share.low,
        f"{prefix}/high": share.high,
    }
