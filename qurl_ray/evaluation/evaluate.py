"""Evaluate a saved policy on held-out problems, without Ray: mean reward, solved problems, avg@k and pass@k.

All estimates have 95 % intervals.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from qurl_ray.config import RunConfig
from qurl_ray.data.answers import items_to_judge
from qurl_ray.data.prompts import check_chat, check_lengths, encode_prompt
from qurl_ray.data.tasks import load_task
from qurl_ray.engines.requests import make_requests
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.environments.declared import declared_traits, with_tools
from qurl_ray.evaluation.statistics import (
    SOLVED,
    Estimate,
    accuracy_with_interval,
    mean_with_bootstrap_interval,
    pass_at_k,
    reward_with_interval,
)
from qurl_ray.evaluation.trajectories import TurnsHere
from qurl_ray.policy.load import context_length, stop_ids
from qurl_ray.rewards.process import VerifierProcess
from qurl_ray.types import SamplingParams
from qurl_ray.weights.local import policy_in

_PROBLEMS_AT_A_TIME = 64  # between two progress reports


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of an evaluation. A failed reward counts as 0."""

    policy: str
    quantization: str
    kernels: list[str]
    reward: Estimate
    """Mean reward of the greedy answers."""
    accuracy: Estimate
    """Share of problems that the greedy answers solved, that is, with a reward above 0.5."""
    samples: int
    """k, the number of samples per problem. If it is 0, the estimates below are None."""
    temperature: float
    avg_reward_at_k: Estimate | None
    """Mean reward of the samples."""
    avg_at_k: Estimate | None
    """Share of the samples that solved their problem."""
    pass_at_k: Estimate | None
    """Share of problems that at least one sample solved."""
    failed_rewards: int
    seconds: float
    sets: dict[str, tuple[Estimate, Estimate]] = field(default_factory=dict)
    """`reward` and `accuracy` of each set of held-out problems, if there are several with names."""

    def as_dict(self) -> dict:
        return asdict(self)


def evaluate(
    config: RunConfig,
    policy: Path | str,
    *,
    quantization: str | None = None,
    samples: int = 0,
    temperature: float = 1.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Load `policy` into the embedded engine and judge its answers to the problems of `config.task`.

    Args:
        quantization: format of the linear layers in the blocks, "none" for full precision; None for the format of the
            checkpoint. A checkpoint of codes is evaluated with exactly these codes.
        samples: k, the number of samples per problem; 0 evaluates greedy answers only.
        progress: called with (number of answers judged, total number of answers).

    Raises:
        QurlError: the policy, the task or the reward cannot be used, or the policy holds codes of another format.
    """
    started = time.perf_counter()
    policy = Path(policy)
    held = policy_in(policy, config.model.max_length)
    quantization, spec, tokenizer = held.format(quantization), held.spec, held.tokenizer()
    config = with_tools(config, declared_traits(config.environment))
    task = load_task(config.task, eval_problems=config.evaluation.problems)
    check_chat(config.task, tokenizer, task.held_out)
    encode = partial(encode_prompt, tokenizer=tokenizer, task=config.task)
    limit = config.rollout.max_new_tokens
    check_lengths(task.held_out, encode, max_new_tokens=limit, context=context_length(spec))
    engine, _ = held.into(
        lambda kernel: TorchEngine(spec, slots=config.rollout.slots, kernel=kernel), quantization, config.quantization
    )
    stops = stop_ids(spec, tokenizer)
    rounds = [(SamplingParams(temperature=0.0, max_new_tokens=limit, stop_ids=stops), 1)]
    if samples:
        rounds.append((SamplingParams(temperature=temperature, max_new_tokens=limit, stop_ids=stops), samples))
    total = len(task.held_out) * sum(count for _, count in rounds)
    rewards_by_round, failed, done = [], 0, 0
    timeout_s, memory_gb = config.task.reward_timeout_s, config.task.reward_memory_gb
    with VerifierProcess(task.reward, timeout_s, memory_gb=memory_gb) as verifier, ExitStack() as stack:
        verifier.check()
        turns = None
        if config.environment.type is not None:
            turns = stack.enter_context(TurnsHere(config, engine, tokenizer, stops, context=context_length(spec)))
        for sampling, count in rounds:
            rewards: list[float] = []
            # All at once, because the seed of a request depends on the index of its problem among all problems.
            requests = make_requests(
                task.held_out, encode, samples=count, sampling=sampling, seed=config.seed, salt="evaluation"
            )
            owners = [problem for problem in task.held_out for _ in range(count)]
            for start in range(0, len(requests), _PROBLEMS_AT_A_TIME * count):
                part = slice(start, start + _PROBLEMS_AT_A_TIME * count)
                if turns:
                    verdicts = turns.judged(requests[part], owners[part], verifier)
                else:
                    completions = engine.generate(requests[part], version=1)
                    items = items_to_judge(completions, owners[part], tokenizer, stops, config.task)
                    verdicts = verifier.judge_many(items)
                rewards += [verdict.reward for verdict in verdicts]
                failed += sum(verdict.status != "ok" for verdict in verdicts)
                done += len(verdicts)
                progress(done, total)
            rewards_by_round.append(np.array(rewards).reshape(-1, count))
    greedy_P, sampled_PG = rewards_by_round[0][:, 0], rewards_by_round[-1]
    solved_P = (sampled_PG > SOLVED).sum(axis=1)
    return Report(
        policy=str(policy),
        quantization=quantization,
        kernels=engine.kernels(),
        reward=reward_with_interval(greedy_P),
        accuracy=accuracy_with_interval(greedy_P > SOLVED),
        samples=samples,
        temperature=temperature,
        avg_reward_at_k=mean_with_bootstrap_interval(sampled_PG.mean(axis=1)) if samples else None,
        avg_at_k=mean_with_bootstrap_interval(solved_P / samples) if samples else None,
        pass_at_k=mean_with_bootstrap_interval([pass_at_k(samples, int(c), samples) for c in solved_P])
        if samples
        else None,
        failed_rewards=failed,
        seconds=time.perf_counter() - started,
        sets=_by_set(greedy_P, [problem.held_out_set for problem in task.held_out]),
    )


def _by_set(rewards_P: np.ndarray, names: Sequence[str]) -> dict[str, tuple[Estimate, Estimate]]:
    """Return reward and accuracy of each named set of held-out problems."""
    parts = {name: rewards_P[np.array(names) == name] for name in dict.fromkeys(names) if name}
    return {name: (reward_with_interval(r), accuracy_with_interval(r > SOLVED)) for name, r in parts.items()}
