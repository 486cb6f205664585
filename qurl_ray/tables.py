"""The tables of functions that settings name: what can be added from outside without a change of the package.

table          setting                     a function of
TASKS          task.type                   the task's section, to its problems
REWARDS        task.reward                 an answer and its problem, to a number
ENVIRONMENTS   environment.type            parameters, to an environment of one trajectory
TOOLS          environment.params          what a policy asks, to what it is told (environment.type=tools)
ADVANTAGES     algorithm.advantage         the rewards of a step, to what each sample is worth
CORRECTIONS    algorithm.correction        log(p/b), to the weight of each token
OBJECTIVES     algorithm.objective         log(theta/p), advantages and bounds, to what is maximised
SINKS          tracking.sinks              a run's folder and settings, to a receiver of events
ENGINES        rollout.engine              a policy and options, to an engine
TRANSPORTS     sync.transport              a link to the engines, to a transport of weights
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from qurl_ray.errors import ConfigError, DataError, EnvironmentFailed, RewardError
from qurl_ray.extensions import Entry, Table

# --- problems and rewards --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEntry(Entry):
    """A type of task."""

    reward: str
    """Judges its answers where task.reward says nothing."""


TASKS = Table[TaskEntry](
    kind="task",
    group="qurl_ray.tasks",
    arguments=("task",),
    error=DataError,
    entries={
        "arithmetic": TaskEntry(
            reference="qurl_ray.data.arithmetic:arithmetic_split", help="makes sums from a seed", reward="exact"
        ),
        "reasoning_gym": TaskEntry(
            reference="qurl_ray.data.gym:gym_split", help="takes a reasoning-gym data set", reward="reasoning_gym"
        ),
        "dataset": TaskEntry(
            reference="qurl_ray.data.files:dataset_split",
            help="reads a file, or a data set of the hub",
            reward="math_verify",
        ),
        "custom": TaskEntry(
            reference="qurl_ray.data.custom:custom_split", help="calls a function of your own", reward="exact"
        ),
    },
)
"""Types of tasks; each has a section in config.task. `custom` is the way in for functions from outside."""

PROBLEMS = Table[Entry](
    kind="source of problems",
    group="qurl_ray.problems",
    arguments=None,
    error=DataError,
    entries={
        "running_sums": Entry(reference="qurl_ray.data.running_sums:running_sums", help="makes running sums of digits"),
        "textarena": Entry(
            reference="qurl_ray.environments.textarena:games",
            help="makes games of TextArena",
            needs=("textarena",),
            install="pip install textarena",
        ),
        "verifiers": Entry(
            reference="qurl_ray.environments.verifiers:tasks",
            help="takes the tasks of a task set of verifiers",
            needs=("verifiers.v1",),
            install="pip install verifiers",
        ),
    },
)
"""Functions that task.problems names, for tasks of the type custom. They get task.params as keywords."""

REWARDS = Table[Entry](
    kind="reward",
    group="qurl_ray.rewards",
    arguments=("answer", "problem"),
    error=RewardError,
    entries={
        "exact": Entry(reference="qurl_ray.rewards.scorers:exact", help="gives 1 if the answer is the expected text"),
        "last_number": Entry(
            reference="qurl_ray.rewards.scorers:last_number",
            help="gives 1 if the last integer of the answer is the expected one",
        ),
        "math_verify": Entry(
            reference="qurl_ray.rewards.scorers:math_verify",
            help="gives 1 if the answer equals the expected one as mathematics",
            needs=("math_verify",),
        ),
        "reasoning_gym": Entry(
            reference="qurl_ray.rewards.scorers:reasoning_gym",
            help="calls the data set's own scorer, with the last boxed text or the whole answer",
            needs=("reasoning_gym",),
        ),
        "reasoning_gym_boxed": Entry(
            reference="qurl_ray.rewards.scorers:reasoning_gym_boxed",
            help="does the same, and gives 0 without a box",
            needs=("reasoning_gym",),
        ),
    },
)

ENVIRONMENTS = Table[Entry](
    kind="environment",
    group="qurl_ray.environments",
    arguments=None,
    error=EnvironmentFailed,
    entries={
        "calculator": Entry(
            reference="qurl_ray.environments.calculator:Calculator",
            help="computes `[37*48]`, for the tiny policy",
        ),
        "tools": Entry(
            reference="qurl_ray.environments.tools:Tools",
            help="calls the functions of environment.params.functions, such as `python`",
        ),
        "textarena": Entry(
            reference="qurl_ray.environments.textarena:TextArena",
            help="plays a game of TextArena for one player",
            needs=("textarena",),
            install="pip install textarena",
        ),
        "skyrl_gym": Entry(
            reference="qurl_ray.environments.skyrl_gym:SkyRLGym",
            help="is one of SkyRL Gym",
            needs=("skyrl_gym",),
            install="pip install skyrl-gym",
        ),
        "verifiers": Entry(
            reference="qurl_ray.environments.verifiers:Verifiers",
            help="is an episode of an environment of verifiers",
            needs=("verifiers.v1",),
            install="pip install verifiers",
        ),
        "openenv": Entry(reference="qurl_ray.environments.openenv:OpenEnv", help="is a session of an OpenEnv server"),
    },
)
"""Classes of environments (environments.protocol). They get environment.params as keywords."""

TOOLS = Table[Entry](
    kind="tool",
    group="qurl_ray.tools",
    arguments=None,
    error=EnvironmentFailed,
    entries={"python": Entry(reference="qurl_ray.tools.python:Python", help="runs a program of the policy")},
)
"""Functions that a policy may call, and classes of objects that it may call (tools.registry)."""

# --- the update ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Entry):
    """A form of the objective, and how it is clipped where the settings say nothing."""

    bounds: Mapping[str, float] = field(default_factory=dict)
    """clip_low, clip_high, dual_clip."""
    clips_tokens: bool = True
    """True if the ratio of each token is clipped by itself: ACR widens that clip."""


_ANSWERS = {"clip_low": 3e-4, "clip_high": 4e-4}

OBJECTIVES = Table[Objective](
    kind="objective",
    group="qurl_ray.objectives",
    arguments=("log_ratio_BT", "adv_BT", "mask_BT", "bounds"),
    entries={
        "ppo": Objective(reference="qurl_ray.rl.surrogate:ppo", help="clips the ratio of each token"),
        "gspo": Objective(
            reference="qurl_ray.rl.surrogate:gspo",
            help="clips the mean ratio of a whole answer",
            bounds=_ANSWERS,
            clips_tokens=False,
        ),
        "tbpo": Objective(
            reference="qurl_ray.rl.surrogate:gspo",
            help="is gspo with a dual clip, which leaves answers with a negative advantage a narrow band",
            bounds=_ANSWERS | {"dual_clip": 1 + 7e-4},
            clips_tokens=False,
        ),
        "cispo": Objective(
            reference="qurl_ray.rl.surrogate:cispo",
            help="makes the clipped ratio a constant weight",
            bounds={"clip_low": 1.0, "clip_high": 4.0},
            clips_tokens=False,
        ),
    },
)

ADVANTAGES = Table[Entry](
    kind="advantage",
    group="qurl_ray.advantages",
    arguments=("rewards_PG", "lengths_PG"),
    entries={
        "grpo": Entry(
            reference="qurl_ray.rl.advantages:grpo", help="subtracts the mean of its group and divides by the deviation"
        ),
        "dr_grpo": Entry(reference="qurl_ray.rl.advantages:dr_grpo", help="subtracts the mean of its group"),
        "rloo": Entry(reference="qurl_ray.rl.advantages:rloo", help="subtracts the mean of the others in its group"),
        "reinforce_baseline": Entry(
            reference="qurl_ray.rl.advantages:reinforce_baseline",
            help="subtracts the mean of its group, then normalises over all tokens of the step",
        ),
    },
)

CORRECTIONS = Table[Entry](
    kind="correction", group="qurl_ray.corrections", arguments=("log_rho_BT", "mask_BT"), entries={}
)
"""Weights of a user's own. The package's corrections are sections (config.algorithm): each has settings of its own."""

# --- tracking --------------------------------------------------------------------------------------------------------

SINKS = Table[Entry](
    kind="sink",
    group="qurl_ray.sinks",
    arguments=("run_dir", "settings"),
    error=ConfigError,
    entries={
        "tensorboard": Entry(
            reference="qurl_ray.tracking.trackers:TensorBoard",
            help="writes event files to the run's folder",
            needs=("tensorboardX",),
        ),
        "wandb": Entry(
            reference="qurl_ray.tracking.trackers:WandB",
            help="logs to Weights & Biases (pip install wandb)",
            needs=("wandb",),
        ),
        "ray": Entry(
            reference="qurl_ray.actors.metrics:RayMetrics", help="shows gauges to Prometheus, beside Ray's own"
        ),
    },
)
"""Receivers of events (tracking.sink.Sink), beside the files, the console and MLflow."""

# --- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry(Entry):
    """An engine, and what the settings are checked against before it is imported. The defaults are those of engines
    from outside the package."""

    check: str | None = None
    """Reference of a function that is called before a run, and raises ConfigError if the engine cannot work here. Its
    arguments are those of engines.vllm.check.check."""
    kv_cache: tuple[str, ...] = ("full",)
    """Number formats of keys and values that it has."""
    kv_scales: Literal["head", "layer"] = "head"
    """Number of scales of FP8 keys, and of values: one for each key head of a layer, or one for the layer."""
    equal_bits: bool = False
    """It computes as the learner does: on a CPU, their log-probs are equal bit for bit."""
    adapters: bool = False
    """It adds LoRA adapters to its linears (PolicySpec.adapters)."""
    experts: tuple[str, ...] = ()
    """Kinds of mixtures of experts that it has, as config.json names them (model_type)."""
    routes: tuple[str, ...] = ()
    """Devices on which it can note the experts of each token, without tensor parallelism."""
    tensor_parallel: bool = False
    """Several processes may share the weights of one engine."""
    drafts: bool = False
    """It can draft tokens with codes and verify them in full precision, with the same noise (rollout.lossless)."""
    captures: bool = False
    """It can capture decode steps as CUDA graphs."""
    graphs_on_cuda: bool = False
    """On CUDA it captures decode steps unless the settings say otherwise, and holds one number format at a time: a load
    in another one restarts it."""
    sleeps_on_cpu: bool = True
    """It can release memory on a CPU."""
    takes_free_memory: bool = False
    """It takes all free memory of its GPU for keys and values, unless their size is set."""
    transports: tuple[str, ...] = ()
    """Direct transports that it can receive from (engines.protocol.DirectEngine)."""


_MIXTURES = ("mixtral", "olmoe", "qwen3_moe")
ENGINES = Table[EngineEntry](
    kind="engine",
    group="qurl_ray.engines",
    arguments=("spec", "options"),
    entries={
        "torch": EngineEntry(
            reference="qurl_ray.engines.make:torch_engine",
            help="is this package's own, whose log-probs equal the learner's bit for bit on a CPU",
            kv_cache=("full", "fp8"),
            equal_bits=True,
            adapters=True,
            experts=(*_MIXTURES, "gpt_oss", "qwen2_moe"),
            routes=("cpu", "cuda"),
            drafts=True,
            captures=True,
        ),
        "vllm": EngineEntry(
            reference="qurl_ray.engines.make:vllm_engine",
            help="is vLLM 0.32 with this package's quantization",
            check="qurl_ray.engines.vllm.check:check",
            kv_cache=("full", "fp8"),
            kv_scales="layer",
            adapters=True,
            experts=_MIXTURES,
            routes=("cpu",),
            tensor_parallel=True,
            captures=True,
            graphs_on_cuda=True,
            sleeps_on_cpu=False,
            takes_free_memory=True,
            transports=("nccl", "ipc"),
        ),
    },
    outside=lambda name: EngineEntry(reference=name, help="is from outside the package"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportEntry(Entry):
    """A transport of weights."""

    direct: bool = False
    """Weights go from GPU to GPU into engines that hold a version of the same format. Other versions, and those that
    are sent again, go through the object store."""


TRANSPORTS = Table[TransportEntry](
    kind="transport",
    group="qurl_ray.transports",
    arguments=("link",),
    entries={
        "object_store": TransportEntry(
            reference="qurl_ray.weights.transports.object_store:ObjectStore", help="uses Ray's object store"
        ),
        "nccl": TransportEntry(
            reference="qurl_ray.weights.transports.direct:Broadcast", help="broadcasts from GPU to GPU", direct=True
        ),
        "ipc": TransportEntry(
            reference="qurl_ray.weights.transports.direct:SharedMemory",
            help="hands over the memory of the GPUs that ranks and engines share, with `placement=colocated`",
            direct=True,
        ),
    },
    outside=lambda name: TransportEntry(reference=name, help="is from outside the package"),
)
