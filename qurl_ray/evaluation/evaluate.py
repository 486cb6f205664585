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
import torch
from transformers import PreTrainedTokenizerBase

from qurl_ray.config import RunConfig
from qurl_ray.data.answers import items_to_judge
from qurl_ray.data.prompts import check_chat, check_lengths, encode_prompt
from qurl_ray.data.tasks import Task, load_task
from qurl_ray.engines.requests import make_requests
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.environments.declared import declared_traits, with_tools
from qurl_ray.errors import ConfigError
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
from qurl_ray.rl.ratios import kl_estimate
from qurl_ray.types import PolicySpec, Request, SamplingParams
from qurl_ray.weights.local import FolderPolicy, policy_in

_PROBLEMS_AT_A_TIME = 64  # between two progress reports


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """Comparison of an evaluated policy with another one, on the same problems."""

    policy: str
    quantization: str
    reward: Estimate
    """Mean reward of the other policy's greedy answers."""
    difference: Estimate
    """Mean of the evaluated policy's reward minus the other's, problem by problem."""
    kl: Estimate
    """KL(evaluated ‖ other), nats per token: k3 of answers that the evaluated policy drew at temperature 1, one to each
    problem. Its interval is over problems."""


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
    against: Against | None = None
    """Comparison with another policy, if one was given."""

    def as_dict(self) -> dict:
        return asdict(self)


def evaluate(
    config: RunConfig,
    policy: Path | str,
    *,
    quantization: str | None = None,
    samples: int = 0,
    temperature: float = 1.0,
    against: Path | str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Load `policy` into the embedded engine and judge its answers to the problems of `config.task`.

    Args:
        quantization: format of the linear layers in the blocks, "none" for full precision; None for the format of the
            checkpoint. A checkpoint of codes is evaluated with exactly these codes.
        samples: k, the number of samples per problem; 0 evaluates greedy answers only.
        against: folder of another policy with the same tokens, to compare with in the format that it holds.
        progress: called with (number of answers judged, total number of answers).

    Raises:
        QurlError: the policy, the task or the reward cannot be used, the policy holds codes of another format, or the
            other policy has another tokenizer.
    """
    started = time.perf_counter()
    policy = Path(policy)
    held = policy_in(policy, config.model.max_length)
    quantization, tokenizer = held.format(quantization), held.tokenizer()
    other = policy_in(Path(against), config.model.max_length) if against else None
    if other and other.tokenizer().get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"{against} has another tokenizer than {policy}: their answers cannot be compared")
    config = with_tools(config, declared_traits(config.environment))
    task = load_task(config.task, eval_problems=config.evaluation.problems)
    check_chat(config.task, tokenizer, task.held_out)
    exam = _Exam(config, task, held.spec, tokenizer, progress)
    check_lengths(task.held_out, exam.encode, max_new_tokens=config.rollout.max_new_tokens, context=exam.context)
    exam.total = len(task.held_out) * (1 + samples + (other is not None))
    timeout_s, memory_gb = config.task.reward_timeout_s, config.task.reward_memory_gb
    engine = _engine(held, quantization, config)
    with VerifierProcess(task.reward, timeout_s, memory_gb=memory_gb) as verifier:
        verifier.check()
        greedy_P = sampled_PG = exam.rewards(engine, verifier)[:, 0]
        if samples:
            sampled_PG = exam.rewards(engine, verifier, temperature, samples)
        kernels, comparison = engine.kernels(), None
        if other:
            requests = exam.requests(1.0, 1)
            answers = engine.generate(requests, version=1)
            engine.close()  # one engine at a time
            engine = _engine(other, other.held, config)
            texts = [(r.prompt_ids, answer.token_ids) for r, answer in zip(requests, answers, strict=True)]
            other_P = exam.rewards(engine, verifier)[:, 0]
            comparison = Against(
                policy=str(against),
                quantization=other.held,
                reward=reward_with_interval(other_P),
                difference=mean_with_bootstrap_interval(greedy_P - other_P),
                kl=_kl_with_interval([answer.logprobs for answer in answers], engine.score(texts)),
            )
    solved_P = (sampled_PG > SOLVED).sum(axis=-1)
    return Report(
        policy=str(policy),
        quantization=quantization,
        kernels=kernels,
        reward=reward_with_interval(greedy_P),
        accuracy=accuracy_with_interval(greedy_P > SOLVED),
        samples=samples,
        temperature=temperature,
        avg_reward_at_k=mean_with_bootstrap_interval(sampled_PG.mean(axis=1)) if samples else None,
        avg_at_k=mean_with_bootstrap_interval(solved_P / samples) if samples else None,
        pass_at_k=mean_with_bootstrap_interval([pass_at_k(samples, int(c), samples) for c in solved_P])
        if samples
        else None,
        failed_rewards=exam.failed,
        seconds=time.perf_counter() - started,
        sets=_by_set(greedy_P, [problem.held_out_set for problem in task.held_out]),
        against=comparison,
    )


def _engine(policy: FolderPolicy, format_name: str, config: RunConfig) -> TorchEngine:
    make = partial(TorchEngine, policy.spec, slots=config.rollout.slots)
    engine, _ = policy.into(lambda kernel: make(kernel=kernel), format_name, config.quantization)
    return engine


class _Exam:
    """The held-out problems of a task: requests to an engine, and rewards of its answers.

    Args:
        progress: called with (number of answers judged, total number of answers).
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        spec: PolicySpec,
        tokenizer: PreTrainedTokenizerBase,
        progress: Callable[[int, int], None],
    ) -> None:
        self._config, self._problems, self._tokenizer, self._progress = config, task.held_out, tokenizer, progress
        self.encode = partial(encode_prompt, tokenizer=tokenizer, task=config.task)
        self.context = context_length(spec)
        self._stops = stop_ids(spec, tokenizer)
        self.failed = self._done = self.total = 0

    def requests(self, temperature: float, count: int) -> list[Request]:
        """Return `count` requests for each problem. All at once, because the seed of a request depends on the index of
        its problem among all problems."""
        limit = self._config.rollout.max_new_tokens
        sampling = SamplingParams(temperature=temperature, max_new_tokens=limit, stop_ids=self._stops)
        seed = self._config.seed
        return make_requests(
            self._problems, self.encode, samples=count, sampling=sampling, seed=seed, salt="evaluation"
        )

    def rewards(
        self, engine: TorchEngine, verifier: VerifierProcess, temperature: float = 0.0, count: int = 1
    ) -> np.ndarray:
        """Return the rewards [problem, sample] of an engine's answers; by default of greedy ones."""
        config, rewards = self._config, list[float]()
        requests = self.requests(temperature, count)
        owners = [problem for problem in self._problems for _ in range(count)]
        with ExitStack() as stack:
            turns = None
            if config.environment.type is not None:
                turns = stack.enter_context(
                    TurnsHere(config, engine, self._tokenizer, self._stops, context=self.context)
                )
            for start in range(0, len(requests), _PROBLEMS_AT_A_TIME * count):
                part = slice(start, start + _PROBLEMS_AT_A_TIME * count)
                if turns:
                    verdicts = turns.judged(requests[part], owners[part], verifier)
                else:
                    completions = engine.generate(requests[part], version=1)
                    items = items_to_judge(completions, owners[part], self._tokenizer, self._stops, config.task)
                    verdicts = verifier.judge_many(items)
                rewards += [verdict.reward for verdict in verdicts]
                self.failed += sum(verdict.status != "ok" for verdict in verdicts)
                self._done += len(verdicts)
                self._progress(self._done, self.total)
        return np.array(rewards).reshape(-1, count)


def _kl_with_interval(drawn: Sequence[np.ndarray], scored: Sequence[np.ndarray]) -> Estimate:
    """Return KL(drawn ‖ scored), nats per token, from log-probs of the same answers: the mean over answers of k3's sum,
    over the mean number of tokens."""
    sums = [kl_estimate(torch.from_numpy(p - q), "k3").sum().item() for p, q in zip(drawn, scored, strict=True)]
    tokens = np.mean([len(p) for p in drawn])
    return mean_with_bootstrap_interval(np.array(sums) / tokens)


def _by_set(rewards_P: np.ndarray, names: Sequence[str]) -> dict[str, tuple[Estimate, Estimate]]:
    """Return reward and accuracy of each named set of held-out problems."""
    parts = {name: rewards_P[np.array(names) == name] for name in dict.fromkeys(names) if name}
    return {name: (reward_with_interval(r), accuracy_with_interval(r > SOLVED)) for name, r in parts.items()}
