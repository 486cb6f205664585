"""Workload of a cluster in one step: sequences, their lengths, and the learner's work on them."""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from qurl_ray.config import RunConfig
from qurl_ray.errors import ConfigError
from qurl_ray.planning.machines import PLANNED_AS, Precision

TransportName = Literal["object_store", "ipc", "nccl"]

PROMPT = 256
"""Default length of a prompt, in tokens."""
DYNAMIC_KEPT = 1 / 3
"""Default share of groups that dynamic sampling keeps: verl's recipe for DAPO draws three times what it trains on."""
_MOST_ROUNDS = 10  # algorithm.max_refill_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Workload of one step.

    Answers are `response` · u^k tokens long, with u uniform, and the k that gives their mean. A mean of half the limit
    makes lengths uniform. A mean equal to the limit makes them all equal. A mean below half leaves a long tail.
    """

    prompts: int = 128
    """Number of prompts whose groups are learned from."""
    samples: int = 8
    """Answers to each prompt."""
    prompt: int = PROMPT
    """Mean length of a prompt, in tokens."""
    response: int = 8192
    """Limit of an answer, in tokens."""
    mean: float | None = None
    """Mean length of an answer, in tokens; a quarter of the limit if absent."""
    updates: int = 4
    kept: float = 1.0
    """Share of groups that dynamic sampling keeps. The others are drawn and dropped."""
    reference: bool = False
    """True if a reference model scores every token, for a KL penalty."""
    critic: bool = False
    """True if a value model of the policy's size is trained beside the policy."""
    fp8_learner: bool = False
    """True if the learner's products are FP8, too, when rollouts are FP8 (precision_flow=unified)."""
    lora_rank: int = 0
    """Rank of adapters that alone are trained, on all linears; 0 if all parameters are."""
    lora_codes: Precision | None = None
    """Format of the codes that the learner, too, holds the linears as, under adapters; None for full precision."""
    autocast: bool = True
    """True if the learner's passes are in 16 bits (learner.compute)."""
    checkpointing: bool = True
    micro_tokens: int = 8192
    """Tokens of one forward and backward pass, of a rank."""
    sequence_parallel: int = 1
    """Ranks that share the tokens of a sequence."""
    expert_parallel: bool = False
    """True if each rank of the learner computes some of the experts (learner.expert_parallel)."""
    slots: int = 512
    """Most sequences that an engine decodes at a time."""
    transport: TransportName = "object_store"
    """As sync.transport."""
    bucket: int = 32 << 20
    """sync.bucket_mb, in bytes."""
    staleness: int = 0
    """Steps that rollouts may run ahead of the learner."""
    delta: bool | Literal["auto"] = "auto"
    """As sync.delta."""

    def __post_init__(self) -> None:
        for name in ("prompts", "samples", "prompt", "response", "updates", "micro_tokens", "slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.mean is not None and not 1 <= self.mean <= self.response:
            raise ConfigError(f"a mean answer of {self.mean:g} tokens must be between 1 and the limit, {self.response}")
        if not 0 < self.kept <= 1:
            raise ConfigError(f"a kept share of {self.kept:g} must be above 0 and at most 1")
        if self.transport not in (known := get_args(TransportName)):
            raise ConfigError(f"transport {self.transport!r} has no model here: there are {', '.join(known)}")
        if self.staleness < 0:
            raise ConfigError(f"staleness is {self.staleness}, and must be at least 0")
        if self.updates > self.prompts:
            raise ConfigError(f"{self.updates} updates need as many prompts: a mini-batch holds whole groups")

    @property
    def sequences(self) -> int:
        """Number of sequences that are learned from."""
        return self.prompts * self.samples

    @property
    def rounds(self) -> list[float]:
        """Sequences drawn in each round: first all, then as many as should replace the dropped groups, never more than
        all (training.coordinator.collect)."""
        asked: list[float] = []
        missing = float(self.prompts)
        while missing > self.prompts / 1000 and len(asked) < _MOST_ROUNDS:
            asked.append(min(self.prompts, missing / self.kept if asked else self.prompts))
            missing -= asked[-1] * self.kept
        return [prompts * self.samples for prompts in asked]

    @property
    def drawn(self) -> float:
        """Number of sequences that are generated."""
        return sum(self.rounds)

    @property
    def answer(self) -> float:
        """Mean length of an answer, in tokens."""
        return self.mean or max(1.0, self.response / 4)

    @property
    def spread(self) -> float:
        """Exponent k of the lengths response · u^k, whose mean is response / (k + 1)."""
        return self.response / self.answer - 1

    @property
    def square(self) -> float:
        """Mean of the squared lengths of answers."""
        return self.response**2 / (2 * self.spread + 1)

    @property
    def tokens(self) -> float:
        """Number of tokens that are learned from, including prompts."""
        return self.sequences * (self.prompt + self.answer)

    @property
    def pass_tokens(self) -> float:
        """Tokens that a rank computes in a pass, which holds at least one whole sequence."""
        return max(self.micro_tokens, (self.prompt + self.response) / self.sequence_parallel)

    @property
    def attended(self) -> float:
        """Mean length of a token's sequence, averaged over tokens."""
        return (self.prompt**2 + 2 * self.prompt * self.answer + self.square) / (self.prompt + self.answer)

    @property
    def age(self) -> float:
        """Mean number of tokens that a running sequence has drawn, if finished sequences are replaced."""
        return self.square / (2 * self.answer)

    def sends_changes(self, nodes: int) -> bool:
        """Return True if syncs send changes on a cluster of so many nodes."""
        return nodes > 1 if self.delta == "auto" else self.delta

    def longest(self, answers: float) -> float:
        """Expected tokens of the longest of n = `answers` answers: response · (the largest of n uniform numbers)^k."""
        return self.response * answers / (answers + self.spread)

    def running(self, drawn: float) -> float:
        """Share of answers longer than `drawn` tokens."""
        share = min(1.0, drawn / self.response)
        return 1 - share ** (1 / self.spread) if self.spread else float(share < 1)


def configured_workload(config: RunConfig) -> Workload:
    """Return the workload of a run's settings.

    Settings do not give the mean lengths of prompts and answers, or the share of groups that dynamic sampling keeps.
    Their defaults are PROMPT, a quarter of the limit, and DYNAMIC_KEPT. Every run is planned with vLLM engines and CUDA
    graphs, and one on CPUs with a learner in bfloat16.
    """
    rollout, algorithm, learner = config.rollout, config.algorithm, config.learner
    longest = getattr(config.model, "max_length", None)
    room = longest - rollout.max_new_tokens if longest else PROMPT
    return Workload(
        prompts=rollout.prompts_per_step,
        samples=rollout.samples_per_prompt,
        prompt=max(1, min(PROMPT, room)),
        response=rollout.max_new_tokens,
        updates=algorithm.updates_per_rollout,
        kept=DYNAMIC_KEPT if algorithm.dynamic_sampling else 1.0,
        reference=algorithm.kl_coef > 0,
        critic=algorithm.type == "ppo" and algorithm.critic == "separate",
        fp8_learner=config.precision_flow == "unified",
        lora_rank=learner.lora.rank if learner.lora else 0,
        lora_codes=PLANNED_AS[rollout.quantization] if config.lora_over_codes else None,
        autocast=learner.compute != "float32" or learner.device == "cpu",
        checkpointing=learner.gradient_checkpointing,
        transport=cast(TransportName, config.sync.transport),
        bucket=config.sync.bucket_mb << 20,
        micro_tokens=learner.tokens_per_micro_batch,
        sequence_parallel=learner.sequence_parallel,
        expert_parallel=learner.expert_parallel,
        slots=rollout.slots,
        staleness=rollout.max_staleness,
        delta=config.sync.delta,
    )


def gpus_of(config: RunConfig) -> int:
    """Number of GPUs of a run: those of the learner, and those of disaggregated engines."""
    rollout = config.rollout
    engines = rollout.workers * rollout.processes
    return config.learner.workers + (engines if config.placement == "disaggregated" else 0)
