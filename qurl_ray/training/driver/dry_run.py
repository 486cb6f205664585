"""A dry run: the checks of a run that need no weights in memory. It leaves nothing and asks no other machine, but what
the user's own functions and environment do."""

import json
from dataclasses import dataclass, field, replace

from qurl_ray.cache import read_only
from qurl_ray.config.model import GgufModel, ModelConfig, PretrainedModel, TinyModel
from qurl_ray.config.shown import shown
from qurl_ray.config.task import DatasetTask
from qurl_ray.data.files import hub_sources
from qurl_ray.data.tasks import Task
from qurl_ray.environments.process import EnvironmentProcess
from qurl_ray.planning.on_gpu import beyond, fit_on_gpu
from qurl_ray.policy.gguf import converted, gguf_outline
from qurl_ray.policy.load import Outline, local_copy, outline
from qurl_ray.policy.tiny import tiny_outline
from qurl_ray.report.text import one_line
from qurl_ray.tools.calls import EXAMPLES
from qurl_ray.training.driver.early import Early
from qurl_ray.training.driver.prepare import (
    Trial,
    check_cache,
    check_model,
    check_problems,
    check_saving,
    find_policy,
    play_turn,
    row_invariance,
    try_prompts,
    unequalized,
)
from qurl_ray.training.driver.room import check_disk, gpu_bytes, missing_here, start_plan
from qurl_ray.training.driver.run_dir import look_at_run_dir, settings_text

_SHOWN = (1500, 500)
"""Number of characters at the beginning and at the end of a long prompt that are shown."""


@dataclass(slots=True, kw_only=True)
class DryRun:
    """Result of a dry run in which nothing was wrong."""

    settings: str
    """Resolved settings as YAML."""
    checked: list[str] = field(default_factory=list)
    """Parts of the run that were checked, in words."""
    unchecked: list[str] = field(default_factory=list)
    """Parts that were not checked, each with the reason."""
    notes: list[str] = field(default_factory=list)
    """Sentences that the run would announce on its problems and its model."""
    example: list[str] = field(default_factory=list)
    """Lines that show one problem as the policy, the reward and the environment get it."""
    missing: str | None = None
    """Reason why the run cannot be made on this machine, but on others."""
    invariance: str | None = None
    """Sentence on equal bits; None if engine and learner do not share one forward pass, or the model is not here."""


def dry_run(early: Early, *, fresh: bool, extend: bool = False) -> DryRun:
    """Make the checks of a run that follow the early ones, and return what was checked.

    Raises:
        QurlError: a run would end in this error.
    """
    config, task, judged = early.config, early.task, early.judged
    result = DryRun(settings=settings_text(shown(config.model_dump(mode="json"))))
    folder, resume = look_at_run_dir(config, fresh=fresh, extend=extend)
    result.checked += ["settings", "functions", folder]
    if isinstance(config.task, DatasetTask) and (hub := hub_sources(config.task)):
        result.unchecked.append(f"problems and prompts, as {' and '.join(hub)} would come from the hub")
    elif task:
        check_problems(task, resume)
        check_cache(config, task)
        counts = f"{len(task.train)} training and {len(task.held_out)} held-out problems"
        result.checked.append(f"{counts} with reward {task.reward}")
        result.notes += task.notes
    policy = _outline(config.model, result)
    if policy is None:
        result.unchecked.append("the model and prompts, as model.path would come from the hub")
    else:
        check_model(config, policy.model)
        check_saving(config, policy)
        result.notes += unequalized(config, policy.model)
        result.checked += [f"the model ({type(policy.model).__name__})", "saving of the policy"]
        result.checked.append(check_disk(config, policy.model))
        stored = config.model if isinstance(config.model, PretrainedModel) else None
        files = local_copy(find_policy(stored).source) if stored else None
        result.notes += filter(None, [start_plan(config, files)])
        ends = ", ".join(f"{policy.tokenizer.decode([token])!r} ({token})" for token in policy.stop_ids)
        result.checked.append(f"the tokens that end an answer: {ends}")
        with read_only():
            invariance = row_invariance(config, policy.model)
        result.invariance = invariance.sentence() if invariance else None
    if task and policy:
        trial = try_prompts(config, task, policy)
        result.notes += trial.notes
        result.checked.append(f"lengths of prompts and answers in a context of {policy.context} tokens")
        result.example = _example(task, judged, policy, trial)
    elif config.environment.type:
        with EnvironmentProcess.of(config.environment) as process:
            play_turn(process, task.train[0]) if task else process.check()
    if config.environment.type:
        turn = "one turn of " if task else "the import of "
        result.checked.append(f"{turn}environment {config.environment.type}")
    memory = gpu_bytes()
    if fit := fit_on_gpu(config, memory) if memory else None:
        result.checked.append(str(fit))
        result.notes += filter(None, [beyond(config, fit)])
    unknown = "placement" if fit else "memory, placement"
    answers = "the reward and the environment" if config.environment.type else "the reward"
    result.unchecked.append(f"{unknown}, and what answers of the policy do to {answers}: the run shows these")
    result.missing = missing_here(config)
    return result


def _example(task: Task, judged: float, policy: Outline, trial: Trial) -> list[str]:
    """Return lines on the first training problem."""
    problem = task.train[0]
    text, (head, tail) = policy.tokenizer.decode(trial.prompt, skip_special_tokens=False), _SHOWN
    if len(text) > head + tail:
        text = f"{text[:head]} […{len(text) - head - tail:,} characters…] {text[-tail:]}"
    lines = [f"the prompt of {problem.uid} as the policy reads it, {len(trial.prompt)} tokens:"]
    lines += [f"  {one_line(line)}" for line in text.split("\n")]
    if problem.answer:
        lines.append(f"expected answer: {one_line(problem.answer, 200)!r}; reward {task.reward} gives it {judged:g}")
        tried = "this answer"
    else:
        lines.append(f"expected answer: the problem has none; reward {task.reward} gives an empty answer {judged:g}")
        tried = "an empty answer"
    if tools := trial.config.task.chat_template_args.get("tools"):
        names = (tool.get("function", tool).get("name", "?") for tool in tools)
        lines.append(f"tools in the prompt: {', '.join(names)}; none is called by {tried}")
    elif (traits := trial.traits).tools:
        lines.append("prompts have to describe the tools, as environment.params.described is false:")
        lines += [f"  {json.dumps(tool.get('function', tool), ensure_ascii=False)}" for tool in traits.tools]
        if traits.tool_format:
            lines.append(f"  the environment reads calls in this form: {EXAMPLES[traits.tool_format]}")
    if reply := trial.reply:
        said = " / ".join(f"{message['role']}: {message['content']}" for message in reply.messages) or "nothing"
        ends = "; the trajectory ends" if reply.done else ""
        credit = "" if reply.reward is None else f"; reward {reply.reward:g}"
        lines.append(f"the environment's reply to {tried} as a first turn: {one_line(said, 300)}{credit}{ends}")
    return lines


def _outline(model: ModelConfig, result: DryRun) -> Outline | None:
    """Return the policy without its weights; None if it is of the hub and not here. Say in `result` if its tensors are
    not checked."""
    if isinstance(model, TinyModel):
        return tiny_outline(model)
    if isinstance(model, GgufModel) and not converted(model.path):
        result.unchecked.append("the tensors of the GGUF file, as the run would convert it")
        return gguf_outline(model.path, model.max_length)
    spec = find_policy(model)
    here = local_copy(spec.source)
    return outline(replace(spec, source=str(here))) if here else None
