"""Find settings that have no effect in their combination, or a bad one. A run logs them at its start; docs/concepts.md
lists them."""

from collections.abc import Iterator

from qurl_ray.config.algorithm import PPO
from qurl_ray.config.rollout import FOUR_BIT
from qurl_ray.config.run import RunConfig
from qurl_ray.tables import OBJECTIVES


def idle_settings(config: RunConfig) -> list[str]:
    """Return one sentence for each such setting: what was given, why it has no effect, or which, and what to do."""
    checks = (_formats, _corrections, _objectives, _learner, _sampling, _environment)
    return [sentence for check in checks for sentence in check(config)]


def _formats(config: RunConfig) -> Iterator[str]:
    given = config.rollout.quantization
    if given in FOUR_BIT and not config.trains_through_codes:
        yield (
            f"rollout.quantization={given} with precision_flow=rollout_only leaves the whole error of 4 bits to the "
            "correction, and a published run in NVFP4 collapsed so; set precision_flow=unified"
        )


def _corrections(config: RunConfig) -> Iterator[str]:
    algorithm, correction = config.algorithm, config.algorithm.correction
    given = f"algorithm.correction.type={correction.type}"
    # Rollouts that run ahead of the learner need a correction, whatever their precision is. With full-precision
    # rollouts, only the sentence about these is reported.
    fresh = config.rollout.max_staleness == 0
    full = config.rollout.quantization == "none" and config.rollout.kv_cache == "full"
    flow = "learner.lora.base=codes" if config.lora_over_codes else f"precision_flow={config.precision_flow}"
    same_codes = config.trains_through_codes and not correction.metrics_only
    if fresh and full and correction.type != "ignore":
        yield (
            f"{given} has almost no effect with full-precision rollouts, whose log-probs differ from the learner's by "
            "rounding only; set algorithm.correction=ignore"
        )
    elif fresh and same_codes and correction.type != "ignore":
        yield (
            f"{given} has almost no effect with {flow}, in which learner and engines "
            "compute through the same codes; set algorithm.correction=ignore"
        )
    elif correction.type == "acr" and algorithm.updates_per_rollout == 1:
        yield (
            f"{given} has the same effect as tis with algorithm.updates_per_rollout=1, because all ratios to the "
            "proximal policy are 1; choose tis or more updates"
        )
    if correction.metrics_only:
        yield (
            f"{given} has no effect on training with algorithm.correction.metrics_only=true, which only measures it; "
            "set metrics_only to false to apply it"
        )
    if algorithm.calibrate_every and algorithm.updates_per_rollout == 1:
        yield (
            f"algorithm.calibrate_every={algorithm.calibrate_every} only makes the clip bounds four times as wide with "
            "algorithm.updates_per_rollout=1, because all exact ratios are 1; set it to 0 or choose more updates"
        )


def _objectives(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    published = type(algorithm)(objective=algorithm.objective, correction="ignore")  # with the objective's own bounds
    given = f"algorithm.objective={algorithm.objective}"
    for bound in ("clip_low", "clip_high"):
        mine, own = getattr(algorithm, bound), getattr(published, bound)
        if algorithm.objective in ("gspo", "tbpo") and mine > 0.05:
            yield (
                f"algorithm.{bound}={mine} has no effect with {given}, because the mean ratio of a whole answer never "
                f"moves so far; remove it: the default is {own}"
            )
        if algorithm.objective == "cispo" and bound == "clip_high" and mine < 1:
            yield (
                f"algorithm.{bound}={mine} makes all weights small with {given}, whose bounds limit the weights of the "
                f"tokens and not the movement of the policy; remove it: the default is {own}"
            )
    if algorithm.objective == "tbpo" and (algorithm.dual_clip or 0) > 1.05:
        yield (
            f"algorithm.dual_clip={algorithm.dual_clip} has no effect with {given}, because the mean ratio of a whole "
            f"answer never moves so far; remove it: the default is {published.dual_clip}"
        )
    naive = algorithm.correction.type == "naive" and not algorithm.correction.metrics_only
    if algorithm.updates_per_rollout == 1 and not naive and algorithm.objective in OBJECTIVES.entries:
        because = "with algorithm.updates_per_rollout=1, because all ratios are 1"
        if algorithm.objective != "ppo":
            yield f"{given} clips nothing {because}; choose ppo or more updates"
        elif algorithm.dual_clip is not None:
            yield f"algorithm.dual_clip={algorithm.dual_clip} has no effect {because}; remove it or choose more updates"
    unused = {name: getattr(algorithm, name) for name in ("kl_in", "kl_estimator")}
    unused = {name: value for name, value in unused.items() if value != getattr(published, name)}
    if unused and not algorithm.kl_coef:
        settings = " and ".join(f"algorithm.{name}={value}" for name, value in unused.items())
        yield (
            f"{settings} {'has' if len(unused) == 1 else 'have'} no effect with algorithm.kl_coef=0, which means no KL "
            f"penalty; remove {'it' if len(unused) == 1 else 'them'} or set kl_coef"
        )
    if algorithm.kl_coef and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator=k1 has no effect on average with algorithm.kl_in=loss, because its gradient has "
            "mean zero; choose k2 or k3"
        )
    if algorithm.type == "ppo" and algorithm.critic == "shared" and algorithm.critic_lr != PPO().critic_lr:
        yield (
            f"algorithm.critic_lr={algorithm.critic_lr} has no effect with algorithm.critic=shared, a value model that "
            "learns with learner.lr; remove it or choose separate"
        )
    if algorithm.type == "ppo" and algorithm.critic == "separate" and algorithm.critic_coef != PPO().critic_coef:
        yield (
            f"algorithm.critic_coef={algorithm.critic_coef} has no effect with algorithm.critic=separate, a value "
            "model that learns with algorithm.critic_lr; remove it or choose shared"
        )


def _learner(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    offload = "learner.offload_while_waiting=true"
    if learner.offload_while_waiting and learner.device == "cpu" and config.placement == "disaggregated":
        yield f"{offload} only costs time with learner.device=cpu, because there is no GPU memory to free; remove it"
    if learner.backend != "deepspeed" and learner.zero_stage != 2:
        shards = "nothing" if learner.backend == "torch" else "everything"
        yield (
            f"learner.zero_stage={learner.zero_stage} has no effect with learner.backend={learner.backend}, which "
            f"shards {shards}; remove it or choose deepspeed"
        )
    if learner.backend == "deepspeed" and learner.zero_stage == 0 and learner.offload_while_waiting is True:
        yield (
            f"{offload} has no effect with learner.zero_stage=0, because DeepSpeed can move no state at this stage; "
            "choose stage 1, 2 or 3"
        )


def _sampling(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    given = [f"rollout.top_p={rollout.top_p}"] if rollout.top_p < 1 else []
    given += [f"rollout.top_k={rollout.top_k}"] if rollout.top_k else []
    if given:
        yield (
            f"{' and '.join(given)} {'truncates' if len(given) == 1 else 'truncate'} the engine's distribution but not "
            "the learner's, so importance weights contain the difference; set rollout.top_p=1 and rollout.top_k=0 to "
            "avoid it"
        )


def _environment(config: RunConfig) -> Iterator[str]:
    environment = config.environment
    given = [f"environment.{name}" for name in environment.model_fields_set - {"type"}]
    if environment.type is None and given:
        have = "has" if len(given) == 1 else "have"
        yield f"{' and '.join(sorted(given))} {have} no effect without environment.type; set it"
    if environment.type is not None and config.rollout.ignore_eos:
        yield "rollout.ignore_eos=true makes every turn as long as it may be, so that no turn ends by itself; remove it"
