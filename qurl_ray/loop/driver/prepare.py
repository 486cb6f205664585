"""Preparation of a run before anything expensive starts: task, policy, reward, and checks that they fit together."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from qurl_ray.config import RunConfig
from qurl_ray.config.model import GgufModel, TinyModel
from qurl_ray.data.prompts import check_lengths, encode_prompt
from qurl_ray.data.tasks import Task, load_task
from qurl_ray.errors import ConfigError, QuantizationError, RewardError
from qurl_ray.extensions import import_reference
from qurl_ray.numerics.promise import Promise, promise_for
from qurl_ray.policy.gguf import cached_gguf_policy
from qurl_ray.policy.load import context_length, empty_model, head_dim, load_tokenizer
from qurl_ray.policy.tiny import cached_tiny_policy
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.select import quantized_linears
from qurl_ray.quant.uaq import norm_fed_linears
from qurl_ray.rewards.process import VerifierProcess
from qurl_ray.types import PolicySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Task and policy of a run that can start."""

    task: Task
    spec: PolicySpec
    promise: Promise | None
    """This machine's promise of equal bits; None if engine and learner do not share one forward pass."""


def prepare_task(config: RunConfig) -> Task:
    """Load the task and try its reward. Takes seconds, so that a typo is found before a run folder is created.

    Raises:
        DataError, RewardError: one of them cannot be used.
    """
    task = load_task(config.task, eval_problems=config.evaluation.problems)
    check_reward(task, config.task.reward_timeout_s, config.task.reward_memory_gb)
    return task


def prepare(config: RunConfig, task: Task, progress: Callable[[int, float], None]) -> Prepared:
    """Create or find the policy, and check that everything fits together.

    Args:
        progress: called with (step, accuracy) while a tiny policy is made.

    Raises:
        QurlError: something would have failed later; the error names it.
    """
    if isinstance(config.model, TinyModel):
        if config.task.template != "{prompt}":
            raise ConfigError("task.template is for pretrained models: the tiny policy is taught the bare prompts")
        source = str(cached_tiny_policy(config.model, task.train, progress))
    elif isinstance(config.model, GgufModel):
        source = str(cached_gguf_policy(config.model.path))
    else:
        folder = Path(config.model.path).expanduser()  # made absolute: ranks and engines work in other folders
        source = str(folder.resolve()) if folder.is_dir() else config.model.path
    spec = PolicySpec(source=source, max_length=config.model.max_length)
    check_model(config, spec)
    tokenizer = load_tokenizer(spec)
    for problems in (task.train, task.held_out):
        check_lengths(
            problems,
            lambda problem: encode_prompt(problem, tokenizer, template=config.task.template, chat=config.task.chat),
            max_new_tokens=config.rollout.max_new_tokens,
            context=context_length(spec),
        )
    return Prepared(task=task, spec=spec, promise=row_promise(config, spec))


def row_promise(config: RunConfig, spec: PolicySpec) -> Promise | None:
    """Return this machine's promise of equal bits for the policy, measured where it is not known yet; None if engine
    and learner do not share one forward pass."""
    if not config.shares_forward():
        return None
    with torch.device("meta"):
        model = empty_model(spec)
    return promise_for(model, head_dim=head_dim(model.config))


def check_reward(task: Task, timeout_s: float, memory_gb: float) -> None:
    """Judge one correct answer: a reward that cannot be found, raises, hangs or returns no number fails here.

    Raises:
        RewardError: the reward fails in one of these ways.
    """
    problem = task.held_out[0]
    with VerifierProcess(task.reward, timeout_s, memory_gb=memory_gb) as process:
        process.check()
        (verdict,) = process.judge_many([(problem.answer, problem)])
    if verdict.status != "ok":
        raise RewardError(
            f"reward {task.reward} ended in {verdict.status} on the expected answer of {problem.uid}: {verdict.detail}"
        )


def check_model(config: RunConfig, spec: PolicySpec) -> None:
    """Check that the architecture can be quantized and scaled as configured; no weights are loaded.

    Raises:
        ConfigError: the engine cannot work here, or not with these settings.
        QuantizationError: nothing to quantize, a width that the format's groups do not divide, or nothing for UAQ.
    """
    with torch.device("meta"):
        model = empty_model(spec)
    quantized: list[str] = []
    if config.rollout.quantization != "none":
        fmt = get_format(config.rollout.quantization)
        quantized = list(quantized_linears(model, config.quantization.kept(model.config.num_hidden_layers)))
        for name in quantized:
            width = model.get_submodule(name).in_features
            if fmt.group and width % fmt.group and fmt.rows == 1:
                raise QuantizationError(
                    f"{fmt.name}: {name} has width {width}, no multiple of the group of {fmt.group}"
                )
    if check := config.rollout.engine_entry.check:
        import_reference(check)(quantized)
    if config.quantization.uaq_scale != 1:
        norm_fed_linears(model, config.quantization.uaq_layers)
