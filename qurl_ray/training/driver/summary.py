"""Summary of a run, computed from its totals, and its file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qurl_ray.config import RunConfig
from qurl_ray.config.algorithm import ACR, TIS, AlgorithmConfig
from qurl_ray.errors import CheckpointError
from qurl_ray.evaluation.statistics import paired_p_value
from qurl_ray.files import write_whole
from qurl_ray.spans import PHASES
from qurl_ray.training.messages import Level
from qurl_ray.training.totals import RunTotals


def summarize(config: RunConfig, totals: RunTotals) -> dict[str, Any]:
    """Return the contents of summary.json, but for the keys that only the driver knows.

    Seconds are wall time; `train_seconds` is the sum of the steps, without evaluation and start-up.
    samples_per_second counts every generated sample over that time; rollout_tokens_per_second counts generated
    tokens over the rollout phase.

    `reward_…` is the mean held-out reward, `accuracy_…` the share of held-out problems solved, by a reward above
    0.5. `…_after_quantized` is measured in `quantized_format`: the export's, else the rollouts'; if that is full
    precision, it equals `…_after`. `…_p_value` is the p-value of the paired test between the first and the last
    evaluation in one format: full precision, or where that is not evaluated (evaluation.full_precision), `…_after` is
    None and `…_before` is of the rollouts' format.

    target_reached_at_step is None where evaluation.target_reward was not reached, or is not set.
    """
    sums = totals.sums
    train_seconds = sums["time/step"]
    rollout_seconds = sums["time/rollout"]
    problems = max((int(values["eval/problems"]) for values in totals.evaluations.values()), default=0)
    return {
        "name": config.name,
        **_held_out(totals, "reward", _rewards),
        **_held_out(totals, "accuracy", _outcomes),
        "eval_problems": problems,
        **_sets(totals),
        "steps": totals.steps,
        "target_reached_at_step": totals.reached_at,
        "train_seconds": train_seconds,
        "samples_per_second": sums["rollout/samples"] / train_seconds if train_seconds else None,
        "rollout_tokens_per_second": sums["rollout/tokens"] / rollout_seconds if rollout_seconds else None,
        "phase_seconds": {phase: sums[f"time/{phase}"] for phase in PHASES},
        "precision_flow": config.precision_flow,
        **_adapter(config, totals),
        "quantization": config.rollout.quantization,
        "quantized_format": config.evaluated_format,
        "correction": config.algorithm.correction.type,
        **_effect(config.algorithm, totals),
        "uaq_scale": config.quantization.uaq_scale,
        "acr_active_tokens": int(sums["acr_active_tokens"]) if config.algorithm.correction.type == "acr" else 0,
        "stopped_by_guard": totals.guard_level == Level.STOP,
        "max_rho": totals.max_rho,
    }


def _effect(algorithm: AlgorithmConfig, totals: RunTotals) -> dict[str, str]:
    """A sentence on what ACR, or TIS of tokens, changed, or why it changed nothing; no entry for other corrections."""
    match algorithm.correction:
        case ACR(is_cap=cap, metrics_only=False) | TIS(is_cap=cap, unit="token", metrics_only=False):
            largest, kept = totals.max_rho, int(totals.sums["acr_active_tokens"])
        case _:
            return {}
    if largest is None:
        return {}
    if largest <= cap:
        return {"correction_effect": f"no weight truncated: the largest rho was {largest:.3g}, and C = {cap:g}"}
    parts = [f"weights truncated, up to a rho of {largest:.3g}, with C = {cap:g}"]
    if isinstance(algorithm.correction, ACR):
        one = algorithm.updates_per_rollout == 1
        same = "as it is with one update per rollout" if one else "no truncated token reached the clip"
        parts.append(f"{kept:,} tokens kept that TIS would clip" if kept else f"ACR was TIS: {same}")
    return {"correction_effect": "; ".join(parts)}


def _adapter(config: RunConfig, totals: RunTotals) -> dict[str, str]:
    """A description of the adapters; nothing if all parameters are trained."""
    if not (lora := config.learner.lora):
        return {}
    base = f"{config.rollout.quantization} codes" if lora.base == "codes" else "full precision"
    share = "" if totals.trained_share is None else f", {totals.trained_share:.1%} of the parameters"
    return {"adapter": f"LoRA of rank {lora.rank}, α {lora.alpha:g}, on {', '.join(lora.targets)}, over {base}{share}"}


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write summary.json, atomically.

    Raises:
        CheckpointError: it cannot be written. The run then counts as unfinished.
    """
    path = run_dir / "summary.json"
    try:
        write_whole(path, json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}. Checkpoints and policy are kept: make room, and give the "
            "same command again, which repeats the end of the run"
        ) from error


def _held_out(totals: RunTotals, name: str, per_problem: Callable[[dict[str, Any]], list[float]]) -> dict[str, Any]:
    """A figure of the evaluations before and after training, and the p-value of their difference, paired by problem."""
    before, after = totals.evaluations.get("before", {}), totals.evaluations.get("after", {})
    quantized = totals.evaluations.get("after, quantized", after)
    first, second = per_problem(before), per_problem(after or quantized)
    return {
        f"{name}_before": before.get(f"eval/{name}"),
        f"{name}_after": after.get(f"eval/{name}"),
        f"{name}_after_quantized": quantized.get(f"eval/{name}"),
        f"{name}_p_value": paired_p_value(first, second) if first and second else None,
    }


def _sets(totals: RunTotals) -> dict[str, Any]:
    """Figures of each set of held-out problems, before and after; nothing if they have no names."""
    sets: dict[str, dict[str, float]] = {}
    for label, suffix in (("before", "before"), ("after", "after"), ("after, quantized", "after_quantized")):
        for key, value in totals.evaluations.get(label, {}).items():
            parts = key.split("/")  # eval/<name>/accuracy
            if len(parts) == 3 and parts[0] == "eval" and parts[2] in ("reward", "accuracy"):
                sets.setdefault(parts[1], {})[f"{parts[2]}_{suffix}"] = value
    return {"eval_sets": sets} if sets else {}


def _outcomes(evaluation: dict[str, Any]) -> list[float]:
    """1 for each problem that was solved, else 0; empty if there was no evaluation."""
    return [float(outcome == "1") for outcome in evaluation.get("outcomes", "")]


def _rewards(evaluation: dict[str, Any]) -> list[float]:
    """Reward of each problem; empty if there was no evaluation. If all are 0 or 1, they are recorded as outcomes."""
    return evaluation.get("rewards") or _outcomes(evaluation)
