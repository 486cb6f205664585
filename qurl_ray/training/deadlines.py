"""Deadlines of whole phases, computed from the deadlines of their parts."""

from qurl_ray.config import RunConfig


def collection_deadline(config: RunConfig) -> float:
    """Seconds after which rollouts and rewards of a step (or an evaluation) cannot still be under way.

    Every round and every reward has its own deadline, which passes first and names what is late. A round may be
    generated twice if workers die during it, and may wait for one to start.
    """
    algorithm, rollout = config.algorithm, config.rollout
    rounds: float = algorithm.max_refill_rounds if algorithm.dynamic_sampling else 1
    answers = max(rollout.prompts_per_step * rollout.samples_per_prompt, config.evaluation.problems)
    if config.environment.type is not None:
        turns = -(-answers // config.environment.concurrency) * config.environment.max_turns
        rounds *= turns * (1 + config.environment.timeout_s / rollout.timeout_s)
    return rounds * (2 * rollout.timeout_s + rollout.start_limit_s + judging_deadline(config, answers))


def sync_deadline(config: RunConfig) -> float:
    """Seconds after which engines cannot still be loading a version, a restart for another format included."""
    return config.sync.timeout_s + (config.rollout.start_limit_s if config.rollout.restarts_for_formats else 0.0)


def judging_deadline(config: RunConfig, answers: int) -> float:
    """Seconds that judging `answers` answers can take if every one hangs, plus a margin to start the processes."""
    share = -(-answers // config.task.verifiers)
    return share * (config.task.reward_timeout_s + 5) + 60
