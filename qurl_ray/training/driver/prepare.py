"""Preparation of a run before anything expensive starts: task, policy, reward, and checks that they fit together."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel

from qurl_ray.cache import cache_root
from qurl_ray.config import RunConfig
from qurl_ray.config.lora import LoraConfig
from qurl_ray.config.model import GgufModel, PretrainedModel, TinyModel
from qurl_ray.config.paths import absolute
from qurl_ray.data.prompts import check_chat, check_lengths, encode_prompt, prompt_notes
from qurl_ray.data.tasks import Task
from qurl_ray.data.turns import TurnEncoder
from qurl_ray.environments.declared import with_tools
from qurl_ray.environments.process import CallFailed, EnvironmentProcess
from qurl_ray.environments.protocol import EnvironmentMessage, Step, Traits
from qurl_ray.errors import ConfigError, DataError, EnvironmentFailed, QuantizationError
from qurl_ray.extensions import import_reference
from qurl_ray.files import why_unwritable
from qurl_ray.numerics.invariance import BatchInvariance, invariance_for
from qurl_ray.planning.on_gpu import fit_on_gpu
from qurl_ray.policy.adapters import adapters_of, add_adapters, load_adapter, read_adapter, target_modules
from qurl_ray.policy.experts import mixture_of
from qurl_ray.policy.export import quantized_folder
from qurl_ray.policy.gguf import cached_gguf_policy, converted
from qurl_ray.policy.layers import has_sinks, window_of
from qurl_ray.policy.load import Outline, load_tokenizer, outline, tied_head
from qurl_ray.policy.save import policy_folder
from qurl_ray.policy.settings import head_dim
from qurl_ray.policy.tiny import cached_tiny, cached_tiny_policy, tiny_outline
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.uaq import folded_offsets
from qurl_ray.quant.units import Unit, find_sites, units
from qurl_ray.runs.checkpoint import Checkpoint
from qurl_ray.tools.template import template_format
from qurl_ray.training.driver.early import Early, check_heads
from qurl_ray.training.driver.room import gpu_bytes
from qurl_ray.types import PolicySpec, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Task and outline of the policy of a run, which fit together."""

    config: RunConfig
    """Settings with the tools that the environment declares."""
    task: Task
    spec: PolicySpec | None
    """None for a tiny policy, which is made later."""
    model: PreTrainedModel
    """Policy without weights, on the meta device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Task and policy of a run that can start."""

    task: Task
    spec: PolicySpec
    keep: tuple[str, ...]
    """Patterns of the parameters that no format quantizes."""
    invariance: BatchInvariance | None
    """Batch invariance on this machine; None if engine and learner do not share one forward pass."""


def check_run(early: Early) -> Checked:
    """Check that task, policy and settings fit together, before a run folder is created and a tiny policy is made.

    Raises:
        QurlError: something would have failed later; the error names it.
    """
    config, task = early.config, early.task
    assert task, "a run has loaded its problems"
    check_cache(config, task)
    spec = None if isinstance(config.model, TinyModel) else find_policy(config.model)
    policy = outline(spec) if spec else tiny_outline(cast(TinyModel, config.model))
    check_model(config, policy.model)
    if memory := gpu_bytes():
        fit_on_gpu(config, memory)
    check_saving(config, policy)
    trial = try_prompts(config, task, policy)
    task = replace(task, notes=(*task.notes, *trial.notes))
    return Checked(config=trial.config, task=task, spec=spec, model=policy.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of a trial of the first training problem."""

    config: RunConfig
    """Settings with the tools that the environment declares."""
    notes: list[str]
    """Sentences on prompts that may not be what they are meant to be."""
    prompt: np.ndarray
    """Tokens before the first turn, int32 [length]."""
    reply: Step | None
    """Reply of the environment to the expected answer as the first turn; None without an environment."""
    traits: Traits = field(default_factory=Traits)
    """Traits of the environment."""


def try_prompts(config: RunConfig, task: Task, policy: Outline) -> Trial:
    """Check that the policy reads the prompts, and play one turn of the environment, if there is one.

    Raises:
        ConfigError, DataError, EnvironmentFailed: see check_prompts and check_environment.
    """
    problem = task.train[0]
    if config.environment.type is None:
        notes = check_prompts(config, task, policy)
        return Trial(
            config=config, notes=notes, prompt=encode_prompt(problem, policy.tokenizer, config.task), reply=None
        )
    with EnvironmentProcess.of(config.environment) as process:
        process.check()
        config = with_tools(config, process.traits)
        notes = check_prompts(config, task, policy)
        prompt, reply = check_environment(config, process, problem, policy)
    return Trial(config=config, notes=notes, prompt=prompt, reply=reply, traits=process.traits)


def prepare(config: RunConfig, checked: Checked, progress: Callable[[int, float], None]) -> Prepared:
    """Make the policy if it is a tiny one that does not exist yet, and learn what this machine promises for it.

    Args:
        progress: called with (step, accuracy) while a tiny policy is made.

    Raises:
        ConfigError: a tiny policy does not reach its accuracy.
    """
    spec, task = checked.spec, checked.task
    if spec is None:
        device = "cuda" if config.learner.device == "cuda" and torch.cuda.is_available() else "cpu"
        source = cached_tiny_policy(cast(TinyModel, config.model), task.train, progress, device=device)
        spec = PolicySpec(source=str(source), max_length=config.model.max_length)
    if config.learner.lora:
        spec = replace(spec, adapters=adapters_of(config.learner.lora))
    keep = config.quantization.kept(checked.model.config.num_hidden_layers)
    return Prepared(task=task, spec=spec, keep=keep, invariance=row_invariance(config, checked.model))


def check_problems(task: Task, resume: Checkpoint | None) -> None:
    """Check that the task has the problems, also the held-out ones, of the run that resumes.

    Raises:
        DataError: a problem or the order differs from the checkpoint's.
    """
    if resume is None:
        return
    if resume.state()["collector"]["problems"] != task.digest():
        raise DataError(
            f"the task's problems, held-out ones included, or their order differ from those of {resume.folder}: give "
            "the task that the run began with, or start again with --fresh"
        )


def check_cache(config: RunConfig, task: Task) -> None:
    """Check that the cache folder can be written if the policy is to be made there.

    Raises:
        ConfigError: it cannot.
    """
    model = config.model
    if isinstance(model, PretrainedModel):
        return
    made = cached_tiny(model, task.train) if isinstance(model, TinyModel) else converted(model.path)
    if not made and (error := why_unwritable(cache_root())):
        raise ConfigError(f"cannot write to the cache folder {cache_root()}: {error}; set $QURL_CACHE or $HOME")


def find_policy(model: PretrainedModel | GgufModel) -> PolicySpec:
    """Return where the policy is. A GGUF file is converted if it was not yet; a folder was looked for already
    (early.check_model_folder).

    Raises:
        ConfigError: a GGUF file is not there, or is damaged.
    """
    if isinstance(model, GgufModel):
        return PolicySpec(source=str(cached_gguf_policy(model.path)), max_length=model.max_length)
    return PolicySpec(source=absolute(model.path), max_length=model.max_length, overrides=model.overrides)


def check_saving(config: RunConfig, policy: Outline) -> None:
    """Write what a run writes only with a checkpoint or at its end, without weights, and read it back. The folder is
    removed at once.

    Raises:
        ConfigError: settings or tokenizer cannot be saved, or not be read again.
        QuantizationError: the format of `export.quantized` cannot be exported.
    """
    kept = config.quantization.kept(policy.model.config.num_hidden_layers)
    exported = config.export.format(config.rollout.quantization)
    with TemporaryDirectory() as aside:
        folder = Path(aside, "policy")
        try:
            with policy_folder(policy.model, policy.tokenizer, folder):
                pass
            if exported != "none":
                with quantized_folder(policy.model, policy.tokenizer, folder, get_format(exported), kept):
                    pass
            load_tokenizer(PolicySpec(source=str(folder), quantized=True))
        except QuantizationError:
            raise
        except Exception as error:  # transformers and tokenizers raise many kinds
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"the run could not save its policy: config.json, generation_config.json or the tokenizer of the model "
                f"cannot be written, or not be read again ({type(error).__name__}: {reason})"
            ) from error


def row_invariance(config: RunConfig, model: PreTrainedModel) -> BatchInvariance | None:
    """Return the batch invariance of the policy on this machine, measured where it is not known yet; None if engine
    and learner do not share one forward pass."""
    if not config.shares_forward():
        return None
    if config.learner.lora:
        model = copy.deepcopy(model)
        add_adapters(model, adapters_of(config.learner.lora))
    return invariance_for(model, head_dim=head_dim(model.config))


def check_prompts(config: RunConfig, task: Task, policy: Outline) -> list[str]:
    """Check that the policy reads the prompts, and that they and their answers fit into its context. Return sentences
    on prompts that may not be what they are meant to be.

    Raises:
        ConfigError, DataError: the message names the template, or a prompt.
    """
    notes = []
    for problems in map(list, (task.train, task.held_out)):  # each is made once
        check_chat(config.task, policy.tokenizer, problems)
        check_lengths(
            problems,
            lambda problem: encode_prompt(problem, policy.tokenizer, config.task),
            max_new_tokens=config.rollout.max_new_tokens,
            context=policy.context,
        )
        notes += prompt_notes(problems, policy.tokenizer, config.task)
    return notes


def check_environment(
    config: RunConfig, process: EnvironmentProcess, problem: Problem, policy: Outline
) -> tuple[np.ndarray, Step]:
    """Play one turn: an environment that cannot be made, fails or hangs fails here, and so does a chat template that
    cannot take its messages, or writes calls of its tools in another format. Return the tokens before the turn, and the
    reply.

    Raises:
        ConfigError, DataError, EnvironmentFailed: one of these.
    """
    settings = config.environment
    turns = TurnEncoder(policy.tokenizer, config.task, policy.stop_ids)
    turns.check(problem, keep_history=settings.rewritten_history != "refuse")
    if process.traits.tools and process.traits.described:
        written, read = template_format(policy.tokenizer), process.traits.tool_format
        if written != read:
            way = f"set environment.params.format={written}" if written else "use another template"
            raise ConfigError(
                f"the tokenizer's chat template writes calls of tools in the format {written}, and the environment "
                f"reads {read}: {way}"
            )
    said, reply = play_turn(process, problem)
    prompt = turns.opening(problem, said) if said else encode_prompt(problem, policy.tokenizer, config.task)
    drawn = np.zeros(0, dtype=np.int32)
    if reply.messages:
        turns.after(problem, drawn, reply.messages)
        if settings.rewritten_history == "new_row" and (history := turns.history(problem, said)):
            turns.follow(problem, history, drawn, problem.answer, reply.messages)
    return prompt, reply


def play_turn(process: EnvironmentProcess, problem: Problem) -> tuple[list[EnvironmentMessage], Step]:
    """Make the environment of a problem, and answer its first turn with the expected answer. Return what it says before
    the turn, and its reply.

    Raises:
        EnvironmentFailed: it cannot be made, fails, or hangs.
    """
    opening = process.reset("trial", problem)
    reply = process.step("trial", problem.answer) if isinstance(opening, list) else opening
    if isinstance(reply, CallFailed):
        raise EnvironmentFailed(
            f"environment {process.name} ended in {reply.kind} when it was tried on {problem.uid}: {reply.detail}"
        )
    assert isinstance(opening, list)
    return opening, reply


def unequalized(config: RunConfig, model: PreTrainedModel) -> list[str]:
    """Return a sentence if `quantization.equalize=auto` leaves out this model, whose architecture is not known."""
    name = config.rollout.quantization
    if config.quantization.equalize != "auto" or name == "none" or not config.quantization.equalizes(name):
        return []
    try:
        find_sites(model)
    except QuantizationError as error:
        return [f"quantization.equalize=auto has no effect here, and codes are coarser than they could be: {error}"]
    return []


def check_adapters(config: RunConfig, lora: LoraConfig, model: PreTrainedModel, quantized: Mapping[str, Unit]) -> None:
    """Check that the model's linears can have the adapters that the settings ask for.

    Raises:
        ConfigError: a target matches nothing, the rank is too large, a linear with an adapter has no codes though the
            base is codes, or the head has; or the adapter to begin with cannot be read, or is another one.
    """
    modules = target_modules(model, adapters_of(lora))
    if lora.base == "codes":
        coded = {unit.module for unit in quantized.values()}
        if kept := [name for name in modules if name not in coded]:
            raise ConfigError(
                f"learner.lora: {kept[0]} would get an adapter, and is kept in full precision by quantization.keep, "
                "keep_first_layers or keep_last_layers: leave it out of learner.lora.targets, or set lora.base=full"
            )
        if (head := model.get_output_embeddings()) and any(model.get_submodule(name) is head for name in coded):
            raise ConfigError("learner.lora.base=codes keeps the head in full precision: leave it in quantization.keep")
    if lora.path:
        model = copy.deepcopy(model)
        add_adapters(model, adapters_of(lora))
        load_adapter(model, read_adapter(Path(lora.path)), Path(lora.path))


def check_model(config: RunConfig, model: PreTrainedModel) -> None:
    """Check that the architecture can be quantized, scaled and divided as configured.

    Raises:
        ConfigError: the engine cannot work here, or not with these settings; or more ranks than the model has heads are
            to share a sequence.
        QuantizationError: nothing to quantize, a width that the format's groups do not divide, or nothing for UAQ.
    """
    check_heads(config, model.config.num_attention_heads)
    engine, kind, mixture = config.rollout.engine_entry, type(model).__name__, mixture_of(model.config)
    if config.rollout.router_replay != "off":
        if not mixture:
            raise ConfigError(
                f"rollout.router_replay={config.rollout.router_replay} needs a mixture of experts, and {kind} is "
                "dense: leave it out"
            )
        if config.rollout.device not in engine.routes or config.rollout.processes > 1:
            raise ConfigError(
                f"rollout.router_replay={config.rollout.router_replay} needs the experts of each token, which "
                f"rollout.engine={config.rollout.engine} does not return on device={config.rollout.device} from "
                f"{config.rollout.processes} process(es): set rollout.engine=torch"
            )
    for name in ("router_balance_coef", "router_z_coef"):
        if getattr(config.algorithm, name) and not mixture:
            raise ConfigError(f"algorithm.{name} needs a mixture of experts, and {kind} is dense: leave it out")
    if config.learner.expert_parallel:
        if not mixture:
            raise ConfigError(f"learner.expert_parallel needs a mixture of experts, and {kind} is dense: leave it out")
        if mixture.experts % config.learner.workers:
            raise ConfigError(
                f"learner.expert_parallel: {mixture.experts} experts cannot be divided by learner.workers="
                f"{config.learner.workers}"
            )
    if mixture and model.config.model_type not in engine.experts:
        raise ConfigError(
            f"{kind} is a mixture of experts, which rollout.engine={config.rollout.engine} does not have: set "
            "rollout.engine=torch"
        )
    if config.learner.device == "cuda" and has_sinks(model):
        raise ConfigError(f"the learner's attention on a GPU has no sinks, and {kind} has some: use another model")
    window, longest = window_of(model.config), config.model.max_length or model.config.max_position_embeddings
    if window and config.learner.device == "cuda" and longest > window:
        raise ConfigError(
            f"the learner's attention on a GPU has no sliding window, and the model has one of {window} tokens: set "
            f"model.max_length={window}, or use another model"
        )
    quantized: dict[str, Unit] = {}
    if config.rollout.quantization != "none":
        fmt = get_format(config.rollout.quantization)
        quantized = units(model, config.quantization.kept(model.config.num_hidden_layers))
        for unit in quantized.values():
            fmt.check_width(unit.module, unit.shape[-1])
    if check := config.rollout.engine_entry.check:
        on_cpu = config.rollout.kv_cache == "fp8" and config.rollout.device == "cpu"
        import_reference(check)(tied_head=bool(quantized.keys() & tied_head(model)), fp8_keys_on_cpu=on_cpu)
    if config.quantization.equalize is True:
        find_sites(model)
    if config.learner.lora:
        check_adapters(config, config.learner.lora, model, quantized)
    if config.quantization.uaq_scale != 1:
        folded_offsets(model, config.quantization.uaq_layers)
