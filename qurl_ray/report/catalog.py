"""Definitions of a report's charts: their titles, panels, and the metrics that they are drawn from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qurl_ray.report.charts import Chart, Panel, Series
from qurl_ray.runs.files import Evaluation, RunRecord
from qurl_ray.runs.values import StepValues
from qurl_ray.spans import PHASES

REWARD = Chart(
    "Held-out reward",
    "Mean reward of greedy answers to problems that are never trained on, with 95 % intervals.",
    (
        Panel(
            (
                Series("full precision", "eval/reward", 1, "eval/reward_low", "eval/reward_high"),
                Series(
                    "as rolled out",
                    "eval_rollout/reward",
                    2,
                    "eval_rollout/reward_low",
                    "eval_rollout/reward_high",
                ),
            ),
            "per problem",
        ),
    ),
)
"""Chart of the mean held-out reward. It is omitted if every reward is 0 or 1: it would show the same as SOLVED."""
SOLVED = Chart(
    "Held-out problems solved",
    "Greedy answers with a reward above 0.5 to problems that are never trained on, with 95 % Wilson intervals.",
    (
        Panel(
            (
                Series("full precision", "eval/accuracy", 1, "eval/low", "eval/high"),
                Series("as rolled out", "eval_rollout/accuracy", 2, "eval_rollout/low", "eval_rollout/high"),
            ),
            "of the problems",
            percent=True,
        ),
    ),
    absent="No evaluation has been recorded.",
)

_SETS = "Held-out sets"
_COLORS = 5

_HELD_OUT = (REWARD, SOLVED)
"""Charts of evaluations; all others are charts of steps."""

_LEARNING = (
    Chart(
        "Reward",
        "Reward of the step's samples, before any length penalty. Solved: a reward above 0.5.",
        (
            Panel(
                (Series("mean", "reward/mean"), Series("solved share", "reward/solved_share", 2, dashed=True)),
                "per sample",
            ),
        ),
    ),
    REWARD,
    SOLVED,
    Chart(
        "Answer length",
        "Truncated answers reached rollout.max_new_tokens, and are mostly wrong for that reason.",
        (
            Panel((Series("mean length", "rollout/mean_length"),), "mean length, tokens"),
            Panel((Series("truncated", "rollout/truncated_share", 2),), "truncated, of the samples", percent=True),
        ),
    ),
    Chart(
        "Entropy",
        "Entropy of the policy at the answers' tokens. Near 0, it has stopped exploring; a sudden rise is divergence.",
        (Panel((Series("entropy", "policy/entropy"),), "nats per token", zero=True),),
    ),
    Chart(
        "Repeated garbage",
        "Tokens in sequences that repeat: quantized rollouts produce them when something is wrong.",
        (Panel((Series("repeated", "rollout/garbage_share", 2),), "of the tokens", percent=True, zero=True),),
        calm=True,
    ),
    Chart(
        "Movement of the policy",
        "KL(p‖theta): movement within a step. To the reference: movement since the run's start, with a KL penalty.",
        (
            Panel((Series("within the step", "policy/kl"),), "nats per token", zero=True, log=True),
            Panel((Series("to the reference", "policy/kl_reference", 2),), "nats per token", zero=True),
        ),
    ),
)

_MISMATCH = (
    Chart(
        "KL(b‖p)",
        "k3 estimate. A mean: a few tokens with a large rho hardly move it.",
        (Panel((Series("KL", "mismatch/kl"),), "nats per token", zero=True, log=True),),
    ),
    Chart(
        "FP8 keys and values",
        "KL(b‖p) on the tokens of the probe, and the KL of FP8 keys and values alone (rollout.kv_cache=fp8).",
        (
            Panel(
                (Series("all", "sync/probe_kl"), Series("keys and values", "sync/probe_kl_keys", 2)),
                "nats per token",
                zero=True,
                log=True,
                sparse=True,
            ),
        ),
        absent="",
    ),
    Chart(
        "Largest rho",
        "rho = p / b of the worst token. Heavy tails show here before they show in the KL.",
        (Panel((Series("max rho", "mismatch/max_rho"),), "max p / b", log=True),),
    ),
    Chart(
        "Effective sample size",
        "1 without mismatch, near 0 if few tokens carry the weight.",
        (
            Panel(
                (
                    Series("of rho", "mismatch/ess"),
                    Series("of the weights used", "mismatch/weight_ess", 2, dashed=True),
                ),
                "share of the tokens",
            ),
        ),
    ),
    Chart(
        "Clipped tokens",
        "Tokens whose gradient the clip removes, because the policy has moved too far. Unbounded: above the bound with "
        "A < 0, where nothing is clipped.",
        (
            Panel(
                (
                    Series("upper, A > 0", "clip/upper", 1),
                    Series("lower, A < 0", "clip/lower", 2),
                    Series("dual, A < 0", "clip/dual", 3),
                    Series("unbounded, A < 0", "clip/upper_negative", 4, dashed=True),
                ),
                "of all tokens",
                percent=True,
                zero=True,
            ),
        ),
        calm=True,
    ),
    Chart(
        "Truncated weights",
        "Tokens with rho above the cap; of those, ACR keeps some that TIS would clip. At 0, ACR was TIS.",
        (
            Panel(
                (Series("rho above the cap", "mismatch/truncated"),),
                "rho above the cap, of all tokens",
                percent=True,
                zero=True,
            ),
            Panel((Series("kept by ACR", "acr_active_tokens", 3),), "kept by ACR, tokens", zero=True),
        ),
        calm=True,
    ),
    Chart(
        "Rejected",
        "Tokens whose weight a band, a rejection or a veto makes 0, and answers that are dropped as a whole.",
        (
            Panel(
                (Series("tokens", "mismatch/dropped"), Series("answers", "mismatch/rejected", 2, dashed=True)),
                "share",
                percent=True,
                zero=True,
            ),
        ),
        calm=True,
    ),
    Chart(
        "Experts",
        "Load: tokens of the busiest expert over an even share, 1 if all are alike. Idle: experts that no answer token "
        "chose. Routes: own experts that differ from those replayed.",
        (
            Panel((Series("load", "router/load"),), "of an even share", zero=True),
            Panel(
                (
                    Series("idle", "router/idle_experts", 2),
                    Series("other routes", "mismatch/routes_differing", 3, dashed=True),
                ),
                "share",
                percent=True,
                zero=True,
            ),
        ),
        absent="",
    ),
    Chart(
        "Cost of quantization",
        "Reward in full precision minus reward as rolled out, at the same weights, with a 95 % interval over problems. "
        "At most and at least bound the mean over the certificates so far, at every look. They say nothing on the "
        "course of training.",
        (
            Panel(
                (
                    Series(
                        "in this certificate", "certificate/cost", 1, "certificate/cost_low", "certificate/cost_high"
                    ),
                    Series("at most", "certificate/cost_most", 2, dashed=True),
                    Series("at least", "certificate/cost_least", 3, dashed=True),
                ),
                "reward",
                sparse=True,
            ),
            Panel(
                (
                    Series("equal tokens", "certificate/equal_tokens", 4),
                    Series("cosine of gradients", "certificate/gradient_cosine", 5),
                    Series("ratio of their norms", "certificate/gradient_ratio", 1, dashed=True),
                ),
                "1 if nothing is lost",
                sparse=True,
            ),
        ),
        absent="",
    ),
    Chart(
        "Codes changed by a sync",
        "At 0, the quantized policy does not change although the learner does.",
        (Panel((Series("codes changed", "sync/codes_changed"),), "of the weight codes", percent=True, zero=True),),
        absent="No codes: rollouts are in full precision, or no step has been recorded yet.",
    ),
)

_COST = (
    Chart(
        "Weight sync",
        "Bytes sent, and the gap between the engines' and the learner's log-probs of the probe with the same codes.",
        (
            Panel(
                (Series("bytes", "sync/bytes_over_bf16"),),
                "bytes, of a full send in bfloat16",
                percent=True,
                zero=True,
            ),
            Panel((Series("probe", "sync/probe_gap", 2),), "mean gap of the probe, nats", zero=True),
        ),
    ),
    Chart(
        "Time per phase",
        "Wall time of a step; with several ranks, that of the slowest.",
        (
            Panel(
                tuple(Series(phase, f"time/{phase}", color) for color, phase in enumerate(PHASES, start=1)),
                "s per step",
                stacked=True,
            ),
        ),
    ),
    Chart(
        "Rollout speed",
        "Generated tokens over the rollout phase, all workers together.",
        (Panel((Series("rollout", "rollout/tokens_per_second"),), "tokens/s", zero=True),),
    ),
    Chart(
        "Drafts",
        "Tokens of a row that a pass in full precision draws, and the share of drafts that agree (rollout.lossless).",
        (
            Panel((Series("tokens", "rollout/tokens_per_pass"),), "tokens per pass", zero=True),
            Panel((Series("agreement", "rollout/draft_agreement", 2),), "of the drafts", percent=True),
        ),
        absent="",
    ),
    Chart(
        "Optimizer",
        "Values of the step's last update; the norm is the one before clipping.",
        (
            Panel((Series("gradient norm", "grad_norm"),), "gradient norm", zero=True, log=True),
            Panel((Series("learning rate", "lr", 2),), "learning rate", zero=True),
        ),
    ),
)

_SURVIVAL = (
    Chart(
        "Guard",
        "Level 1 warns, 2 tightens the objective, 3 rolls out in full precision, and 4 stops the run.",
        (
            Panel((Series("level", "guard/level"),), "level after the step", zero=True),
            Panel((Series("figures beyond", "guard/beyond", 2),), "figures beyond their threshold", zero=True),
        ),
        absent="The guard was off, or no step has been recorded yet.",
        calm=True,
    ),
    Chart(
        "Fleet",
        "Healthy rollout workers at the end of the step. Deaths, repeated requests and hedged chunks (given to a "
        "second worker) are counted since the last start of the coordinator.",
        (
            Panel((Series("healthy", "fleet/healthy"), Series("deaths", "fleet/deaths", 2)), "workers", zero=True),
            Panel(
                (Series("repeated", "fleet/repeated_requests", 3), Series("hedged", "fleet/hedged", 4, dashed=True)),
                "repeated requests, hedged chunks",
                zero=True,
            ),
        ),
    ),
    Chart(
        "Staleness",
        "Steps that the learner was ahead of the weights that drew its tokens.",
        (
            Panel(
                (
                    Series("mean", "rollout/staleness_mean"),
                    Series("largest", "rollout/staleness_max", 2, dashed=True),
                ),
                "steps",
                zero=True,
            ),
        ),
        calm=True,
    ),
)

_TURNS = (
    Chart(
        "Turns",
        "Turns of the policy in a trajectory, and calls of tools in them.",
        (
            Panel(
                (Series("turns", "environment/turns"), Series("calls", "environment/calls", 2)),
                "per trajectory",
                zero=True,
            ),
            Panel((Series("failed calls", "environment/failed_calls", 3),), "of the calls", percent=True, zero=True),
        ),
    ),
    Chart(
        "Waiting for the environment",
        "Time that trajectories wait for their environment, of the time that they take.",
        (Panel((Series("waiting", "environment/waiting"),), "of the time", percent=True, zero=True),),
    ),
    Chart(
        "New rows",
        "Rows of trajectories beyond their first: the chat template rewrote what they held of earlier turns.",
        (Panel((Series("new rows", "environment/new_rows"),), "rows", zero=True),),
        calm=True,
    ),
    Chart(
        "Failed environments",
        "Trajectories that are left out because their environment failed, and those that were replayed.",
        (
            Panel(
                (
                    Series("failed", "environment/failed", 2),
                    Series("replayed", "environment/replays", 1, dashed=True),
                ),
                "trajectories",
                zero=True,
            ),
        ),
        calm=True,
    ),
)

TURNS = "Turns with the environment"
"""Heading of the charts that only runs with an environment have."""
_HEADINGS = {
    "Learning": _LEARNING,
    TURNS: _TURNS,
    "Mismatch between rollouts and learner": _MISMATCH,
    "Cost and optimizer": _COST,
    "Guard, fleet and staleness": _SURVIVAL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Charts under one heading, each with the rows from which it is drawn."""

    title: str
    charts: list[tuple[Chart, Sequence[StepValues]]]


def groups(record: RunRecord, settings: Mapping[str, Any]) -> list[Group]:
    """Return the charts of the report by heading. `settings` are the run's settings by dotted name."""
    quantized = settings.get("rollout.quantization") != "none"
    evaluations = evaluation_rows(record.evaluations, quantized=quantized)
    rows = record.rows
    if not quantized:  # a recorded 0 of code changes means "no codes", but would look like unchanged codes
        rows = [
            (step, {key: value for key, value in values.items() if not key.startswith("sync/codes_changed")})
            for step, values in record.rows
        ]
    made = [
        Group(
            title=title,
            charts=[
                (chart, evaluations if chart in _HELD_OUT else rows)
                for chart in part
                if record.graded or chart is not REWARD
            ],
        )
        for title, part in _HEADINGS.items()
        if title != TURNS or settings.get("environment.type")
    ]
    if any(evaluation.sets for evaluation in record.evaluations):
        learning = made[0].charts
        after = next(place for place, (chart, _) in enumerate(learning, start=1) if chart is SOLVED)
        learning.insert(after, _sets_chart(record.evaluations))
    return made


def _sets_chart(evaluations: Sequence[Evaluation]) -> tuple[Chart, Sequence[StepValues]]:
    """Return a chart with a line for each set of held-out problems, and its rows: of the evaluations during training,
    or of those before and after it in full precision if there are none."""
    during = [evaluation for evaluation in evaluations if evaluation.label == "during"]
    shown = during or [evaluation for evaluation in evaluations if not is_quantized_evaluation(evaluation.label)]
    names = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.sets))
    lines = tuple(
        Series(name, name, 1 + index % _COLORS, f"{name}/low", f"{name}/high", dashed=index >= _COLORS)
        for index, name in enumerate(names)
    )
    policy = "The policy as rolled out." if during else "In full precision, before and after."
    chart = Chart(
        _SETS,
        f"{policy} Share of each set that greedy answers solve, with 95 % Wilson intervals.",
        (Panel(lines, "of the problems", percent=True),),
    )
    rows = [
        (
            evaluation.step,
            {
                key: value
                for name, ends in evaluation.sets.items()
                for key, value in zip((name, f"{name}/low", f"{name}/high"), ends, strict=True)
            },
        )
        for evaluation in shown
    ]
    return chart, rows


def evaluation_rows(evaluations: Iterable[Evaluation], *, quantized: bool) -> list[StepValues]:
    """Return rows by step, under the names that trackers have (tracking.numbers): the solved shares and mean rewards
    `eval/…` in full precision and `eval_rollout/…` as rolled out, with the ends of their intervals.

    A quantized run evaluates the policy with which it rolls out, except `before` and `after`, which use full precision.
    """
    rows: dict[int, dict[str, float | None]] = {}
    for result in evaluations:
        key = "eval_rollout" if quantized and is_quantized_evaluation(result.label) else "eval"
        values = {f"{key}/accuracy": result.accuracy, f"{key}/low": result.low, f"{key}/high": result.high}
        rewards = result.reward, result.reward_low, result.reward_high
        values |= zip((f"{key}/reward", f"{key}/reward_low", f"{key}/reward_high"), rewards, strict=True)
        rows.setdefault(result.step, {}).update(values)
    return sorted(rows.items())


def is_quantized_evaluation(label: str) -> bool:
    """True if evaluations with this label use the policy as rolled out or exported, not in full precision."""
    return label in ("during", "after, quantized")


def headings() -> Mapping[str, tuple[Chart, ...]]:
    """Return all charts by heading."""
    return _HEADINGS


def charts() -> tuple[Chart, ...]:
    """Return all charts that show steps."""
    return tuple(chart for part in _HEADINGS.values() for chart in part if chart not in _HELD_OUT)
