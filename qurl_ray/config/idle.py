"""Find settings that have no effect in their combination. A run logs them at its start; docs/concepts.md lists
them."""

from collections.abc import Iterator

from qurl_ray.config.algorithm import PPO
from qurl_ray.config.run import RunConfig
from qurl_ray.tables import OBJECTIVES


def idle_settings(config: RunConfig) -> list[str]:
    """Return one sentence for each setting that has no effect."""
    return [*_corrections(config), *_objectives(config), *_learner(config), *_sampling(config)]


def _corrections(config: RunConfig) -> Iterator[str]:
    algorithm, correction = config.algorithm, config.algorithm.correction
    # With full-precision rollouts, only the sentence about these is reported.
    full = config.rollout.quantization == "none" and config.rollout.kv_cache == "full"
    if full and correction.type != "ignore":
        yield f"{correction.type} has almost nothing to correct with full-precision rollouts"
    elif config.precision_flow != "rollout_only" and not (correction.type == "ignore" or correction.metrics_only):
        yield f"{correction.type} has almost nothing to correct: learner and engines compute through the same codes"
    elif correction.type == "acr" and algorithm.updates_per_rollout == 1:
        yield "ACR with one update per rollout equals TIS: the ratio to the proximal policy is 1"
    if correction.metrics_only:
        yield f"{correction.type} is measured and not applied: correction.metrics_only trains as ignore does"
    if algorithm.calibrate_every and algorithm.updates_per_rollout == 1:
        yield "calibrate_every with one update per rollout widens the clip fourfold: nothing is cut of a ratio of 1"


def _objectives(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    published = type(algorithm)(objective=algorithm.objective, correction="ignore")  # with the objective's own bounds
    for bound in ("clip_low", "clip_high"):
        mine, own = getattr(algorithm, bound), getattr(published, bound)
        if algorithm.objective in ("gspo", "tbpo") and mine > 0.05:
            yield f"{algorithm.objective} clips a mean over the answer, which {bound}={mine} never cuts: {own} is usual"
        if algorithm.objective == "cispo" and bound == "clip_high" and mine < 1:
            yield f"cispo bounds weights and not movement: {bound}={mine} makes all of them small, {own} is usual"
    if algorithm.objective == "tbpo" and (algorithm.dual_clip or 0) > 1.05:
        yield f"tbpo bounds a mean over the answer, which dual_clip={algorithm.dual_clip} never does: 1.0007 is usual"
    naive = algorithm.correction.type == "naive" and not algorithm.correction.metrics_only
    if algorithm.updates_per_rollout == 1 and not naive and algorithm.objective in OBJECTIVES.entries:
        if algorithm.objective != "ppo":
            yield f"{algorithm.objective} with one update per rollout clips nothing: all ratios are 1"
        elif algorithm.dual_clip is not None:
            yield "dual_clip with one update per rollout does nothing: all ratios are 1"
    if not algorithm.kl_coef and (algorithm.kl_in, algorithm.kl_estimator) != ("loss", "k3"):
        yield "kl_in and kl_estimator say nothing without kl_coef"
    if algorithm.kl_coef and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield "kl_estimator=k1 as a loss has a gradient with mean zero: it holds nothing back; k2 and k3 do"
    if algorithm.type == "ppo" and algorithm.critic == "shared" and algorithm.critic_lr != PPO().critic_lr:
        yield "critic_lr is of a separate value model; a shared one learns with learner.lr"
    if algorithm.type == "ppo" and algorithm.critic == "separate" and algorithm.critic_coef != PPO().critic_coef:
        yield "critic_coef is of a shared value model; a separate one has its own critic_lr"


def _learner(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    if learner.offload_while_waiting and learner.device == "cpu" and config.placement == "disaggregated":
        yield "learner.offload_while_waiting frees a GPU's memory; on the CPU it only costs time"
    if learner.backend == "torch" and learner.zero_stage != 2:
        yield "learner.zero_stage is DeepSpeed's; learner.backend=torch shards nothing"
    if learner.backend == "deepspeed" and learner.zero_stage == 0 and learner.offload_while_waiting:
        yield "learner.offload_while_waiting does nothing with learner.zero_stage=0"


def _sampling(config: RunConfig) -> Iterator[str]:
    if config.rollout.top_p < 1 or config.rollout.top_k:
        yield "top_p/top_k truncate the engine's distribution but not the learner's: importance weights carry the gap"
