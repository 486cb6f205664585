"""The checks that need no model, before transformers is imported, which takes most of a start's seconds: errors in
folders, files, GPUs, problems and the user's functions are told at once."""

import os
from dataclasses import dataclass

import ray

from qurl_ray.actors.cluster import check_folder, check_ray
from qurl_ray.config import RunConfig, resolve
from qurl_ray.config.model import PretrainedModel, TinyModel
from qurl_ray.config.paths import absolute, expanded, is_path
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.config.task import DatasetTask, TaskConfig
from qurl_ray.data.files import hub_sources
from qurl_ray.data.prompts import check_characters, check_lengths, is_chat
from qurl_ray.data.tasks import Task, load_task
from qurl_ray.environments.process import EnvironmentProcess
from qurl_ray.errors import ConfigError, RewardError
from qurl_ray.rewards.process import VerifierProcess
from qurl_ray.tables import TASKS
from qurl_ray.training.driver.room import check_writable, missing_here
from qurl_ray.training.driver.run_dir import submitted
from qurl_ray.types import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """Settings and problems that passed these checks."""

    config: RunConfig
    """Resolved settings."""
    task: Task | None
    """None in a dry run whose problems would come from the hub."""
    judged: float
    """Reward of the first training problem's expected answer; 0 without a task."""


def check_early(config: RunConfig, *, dry: bool = False) -> Early:
    """Check all that can be known without the model, the cheapest first.

    Args:
        dry: ask no other machine, and let GPUs be missing, which the dry run tells at its end.

    Raises:
        QurlError: the run would end in this error.
    """
    config = resolve(config, submitted=submitted())
    if not ray.is_initialized():
        if not dry:
            check_ray()
        elif not os.environ.get("RAY_ADDRESS"):
            check_folder()
        if not dry and (missing := missing_here(config)):
            raise ConfigError(missing)
    check_writable(config)
    if isinstance(config.model, PretrainedModel):
        check_model_folder(config.model)
    if isinstance(config.model, TinyModel):
        check_tiny(config, config.model)
    if config.environment.type:
        with EnvironmentProcess.of(config.environment) as process:
            process.check()
    from qurl_ray.training.driver.functions import try_functions  # it imports torch

    try_functions(config)
    if isinstance(config.model, TinyModel) and config.rollout.quantization != "none":
        check_tiny_widths(config, config.model)
    if dry and isinstance(config.task, DatasetTask) and hub_sources(config.task):
        find_reward(config.task)
        return Early(config=config, task=None, judged=0.0)
    task, judged = prepare_task(config)
    if isinstance(config.model, TinyModel):
        check_tiny_problems(config, config.model, task)
    return Early(config=config, task=task, judged=judged)


def check_tiny(config: RunConfig, model: TinyModel) -> None:
    """Raise ConfigError if the settings need a skill that the tiny policy was not taught."""
    if config.environment.type is not None and not model.calculator:
        raise ConfigError(
            "environment.type: the tiny policy knows the calculator alone, with model.calculator=true; other "
            "environments need a pretrained policy, such as that of smollm2_135m"
        )
    if config.task.template != "{prompt}":
        raise ConfigError("task.template is for pretrained models: the tiny policy is taught the bare prompts")
    check_heads(config, model.heads)


def check_tiny_widths(config: RunConfig, model: TinyModel) -> None:
    """Raise QuantizationError if groups of the format do not divide a width of the tiny policy's linears."""
    from qurl_ray.quant.formats import get_format  # it imports torch

    if config.quantization.kept(model.layers) != QuantizationConfig().kept(model.layers):
        return  # a linear of that width may be kept in full precision
    for name in ("hidden_size", "intermediate_size"):
        get_format(config.rollout.quantization).check_width(f"model.{name}", getattr(model, name))


def check_heads(config: RunConfig, heads: int) -> None:
    """Raise ConfigError if more ranks than the model has heads are to share a sequence."""
    each = config.learner.sequence_parallel
    if each > heads:
        raise ConfigError(
            f"learner.sequence_parallel={each} ranks cannot share the {heads} heads of the model: choose at "
            f"most {heads}"
        )


def check_tiny_problems(config: RunConfig, model: TinyModel, task: Task) -> None:
    """Check that the tiny policy reads the problems, and that they and their answers fit into its context: it has a
    token per character, and no chat template.

    Raises:
        DataError: a problem has other characters, or a prompt is too long.
    """
    check_characters(task.train)
    for problems in (task.train, task.held_out):
        texts = [problem for problem in problems if not is_chat(problem, config.task)]
        most = config.rollout.max_new_tokens
        check_lengths(texts, lambda problem: problem.prompt, max_new_tokens=most, context=model.max_length)


def check_model_folder(model: PretrainedModel) -> None:
    """Raise ConfigError if model.path is a file, or looks like a path and is no folder."""
    source = absolute(model.path)
    place = expanded(source)
    if place.is_file():
        raise ConfigError(f"model.path={model.path} is a file: give the folder of the model, or set model.type=gguf")
    if is_path(source) and not place.is_dir():
        raise ConfigError(f"model.path={model.path}: no such folder: {place.absolute()}")


def prepare_task(config: RunConfig) -> tuple[Task, float]:
    """Load the task and try its reward. Return both: the reward is that of the first training problem's expected
    answer.

    Raises:
        DataError, RewardError: one of them cannot be used.
    """
    task = load_task(config.task, eval_problems=config.evaluation.problems)
    return task, check_reward(config.task, task.reward, task.train[0])


def find_reward(config: TaskConfig) -> None:
    """Look for the reward, without a problem that it could judge.

    Raises:
        RewardError: it is not there, or cannot be imported.
    """
    reward = config.reward or TASKS.entries[config.type].reward
    with VerifierProcess(reward, config.reward_timeout_s, memory_gb=config.reward_memory_gb) as process:
        process.check()


def check_reward(config: TaskConfig, reward: str, problem: Problem) -> float:
    """Return the reward of one correct answer: one that cannot be found, raises, hangs or returns no number fails here.

    Raises:
        RewardError: the reward fails in one of these ways.
    """
    with VerifierProcess(reward, config.reward_timeout_s, memory_gb=config.reward_memory_gb) as process:
        process.check()
        (verdict,) = process.judge_many([(problem.answer, problem)])
    if verdict.status != "ok":
        raise RewardError(
            f"reward {reward} ended in {verdict.status} on the expected answer of {problem.uid}: {verdict.detail}"
        )
    return verdict.reward
