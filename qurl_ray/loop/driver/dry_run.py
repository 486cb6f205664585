"""A dry run: the checks of a run that need no weights in memory. It leaves nothing and asks no other machine."""

import os
from dataclasses import dataclass, field, replace

from qurl_ray.actors.cluster import check_folder
from qurl_ray.cache import read_only
from qurl_ray.config import RunConfig, resolve
from qurl_ray.config.model import GgufModel, ModelConfig, TinyModel
from qurl_ray.config.shown import shown
from qurl_ray.config.task import DatasetTask
from qurl_ray.data.files import hub_sources
from qurl_ray.loop.driver.functions import try_functions
from qurl_ray.loop.driver.prepare import (
    check_cache,
    check_model,
    check_problems,
    check_prompts,
    check_reward,
    check_saving,
    find_policy,
    prepare_task,
    row_promise,
    unequalized,
)
from qurl_ray.loop.driver.run_dir import look_at_run_dir, settings_text, submitted
from qurl_ray.policy.gguf import converted, gguf_outline
from qurl_ray.policy.load import Outline, local_copy, outline
from qurl_ray.policy.tiny import tiny_outline
from qurl_ray.tables import TASKS


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
    promise: str | None = None
    """Sentence on equal bits; None if engine and learner do not share one forward pass, or the model is not here."""


def dry_run(config: RunConfig, *, fresh: bool, extend: bool = False) -> DryRun:
    """Make the checks of a run, and return what they were.

    Raises:
        QurlError: a run would end in this error.
    """
    config = resolve(config, submitted=submitted())
    found = DryRun(settings=settings_text(shown(config.model_dump(mode="json"))))
    if not os.environ.get("RAY_ADDRESS"):
        check_folder()
    try_functions(config)
    folder, resume = look_at_run_dir(config, fresh=fresh, extend=extend)
    found.checked += ["settings", "functions", folder]
    task = None
    if isinstance(config.task, DatasetTask) and (hub := hub_sources(config.task)):
        check_reward(config.task, config.task.reward or TASKS.entries[config.task.type].reward, None)
        found.unchecked.append(f"problems and prompts, as {' and '.join(hub)} would come from the hub")
    else:
        task = prepare_task(config)
        check_problems(task, resume)
        check_cache(config, task)
        counts = f"{len(task.train)} training and {len(task.held_out)} held-out problems"
        found.checked.append(f"{counts} with reward {task.reward}")
        found.notes += task.notes
    policy = _outline(config.model, found)
    if policy is None:
        found.unchecked.append("the model and prompts, as model.path would come from the hub")
        return found
    check_model(config, policy.model)
    check_saving(config, policy)
    found.notes += unequalized(config, policy.model)
    found.checked += [f"the model ({type(policy.model).__name__})", "saving of the policy"]
    ends = ", ".join(f"{policy.tokenizer.decode([token])!r} ({token})" for token in policy.stop_ids)
    found.checked.append(f"the tokens that end an answer: {ends}")
    if task:
        found.notes += check_prompts(config, task, policy)
        found.checked.append(f"lengths of prompts and answers in a context of {policy.context} tokens")
    with read_only():
        promise = row_promise(config, policy.model)
    found.promise = promise.sentence() if promise else None
    return found


def _outline(model: ModelConfig, found: DryRun) -> Outline | None:
    """Return the policy without its weights; None if it is of the hub and not here. Say in `found` if its tensors are
    not checked."""
    if isinstance(model, TinyModel):
        return tiny_outline(model)
    if isinstance(model, GgufModel) and not converted(model.path):
        found.unchecked.append("the tensors of the GGUF file, as the run would convert it")
        return gguf_outline(model.path, model.max_length)
    spec = find_policy(model)
    here = local_copy(spec.source)
    return outline(replace(spec, source=str(here))) if here else None
