"""Records that are passed between layers. This module imports neither the rest of the package nor torch.

Axis letters used in names and comments, everywhere in qurl_ray:
    P prompts in a step    G samples per prompt    B = P*G sequences
    T tokens of a (padded) sequence    V vocabulary    N, K rows and columns of a weight

Token ids are int32 numpy arrays, and log-probs are float32 numpy arrays. A tuple of a thousand Python
ints would cost ten times as much to send between processes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

Finish = Literal["stop", "length", "cancelled", "deadline"]
"""Reason why an answer ended. A "cancelled" or "deadline" answer holds the tokens drawn so far, possibly none."""
Status = Literal["ok", "error", "timeout", "invalid"]
Outcome = Literal["finished", "failed", "interrupted"]
"""How a run ended."""
EventKind = Literal[
    "step",
    "evaluation",
    "checkpoint",
    "phase",
    "warning",
    "info",
    "samples",
    "prompts",
    "timeline",
    "rewind",
    "summary",
]
KINDS: tuple[str, ...] = get_args(EventKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Shape of LoRA adapters (policy.adapters), with PEFT's names.

    Example:
        Adapters(rank=16, alpha=32.0, targets=("all_linear",))
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names of linears, or their last parts; "all_linear" stands for all but the head."""

    @property
    def scaling(self) -> float:
        """Factor on the product of the two matrices."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """Source of a policy and the context length it is used with. It is small, since it is sent to every process."""

    source: str
    """Path of a folder, or Hugging Face hub id."""
    max_length: int | None = None
    """Limit of prompt and answer together, in tokens; None is the model's own limit."""
    quantized: bool = False
    """True for a checkpoint of quantized codes (policy/export.py): engines can load it, but it cannot be trained."""
    overrides: dict = field(default_factory=dict)
    """Entries that replace those of the policy's config.json."""
    adapters: Adapters | None = None
    """Adapters that the engines add to the policy; None for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One prompt, with the data needed to judge an answer to it.

    Example:
        Problem(uid="train-17", prompt="12+34=", answer="46")
    """

    uid: str
    """Identifier, unique in the run; logs refer to it."""
    prompt: str
    answer: str
    meta: dict = field(default_factory=dict)
    """Further data for the task's own scorer, as plain JSON values: of a data set, its other columns. If the answer to
    judge was cut off before its end token, the reward function also finds `truncated`: True here."""
    messages: list[dict] | None = None
    """The conversation that the prompt is, for the tokenizer's chat template, each message with role and content;
    `prompt` is then its text. None for a prompt that is text."""
    held_out_set: str = ""
    """Name of the set of held-out problems that it belongs to, if there are several."""
    chat_template_args: dict = field(default_factory=dict)
    """Variables of the chat template for this prompt, such as {"tools": [...]}; they come before the task's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings for drawing tokens. Temperature 0 is greedy decoding."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to draw from; 0 keeps the whole vocabulary."""
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    """Token ids that end generation. The stop token is part of the answer."""
    ignore_eos: bool = False
    """True to generate exactly max_new_tokens, whatever tokens are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request for one sample, sent to an engine."""

    uid: str
    """Identifier of the form "<problem uid>/<sample index>"."""
    prompt_ids: np.ndarray  # int32 [prompt length]
    seed: int
    """64-bit seed. Token t of the answer is drawn from (seed, t), so worker, order and batch change nothing."""
    sampling: SamplingParams
    """Sampling settings; max_new_tokens counts only tokens that are still to be drawn."""
    drawn: int = 0
    """Number of answer tokens that were drawn before; prompt_ids holds them (engines.requests.continued), and what an
    environment said between them."""
    elsewhere: int = 0
    """Number of those in earlier rows of the trajectory, which prompt_ids does not hold."""
    adapter: str = ""
    """Name of the adapter that the engine adds for this request, of those that it holds beside its weights; "" for
    none."""
    continues: bool = False
    """True if a request that continues this one may follow: an engine may keep its keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTokens:
    """The tokens after a prompt: what the policy drew, and with several turns what an environment said in between.

    Text is encoded once: tokens that the policy drew are never decoded and encoded again.
    """

    uid: str
    token_ids: np.ndarray  # int32 [answer length]
    logprobs: np.ndarray  # float32 [answer length]
    """Log-prob of each token, in nats, under the distribution from which the engine drew it; 0 where `mask` is False.
    """
    versions: np.ndarray  # int32 [answer length]
    """Weight version with which each token was drawn; -1 where `mask` is False."""
    mask: np.ndarray | None = None  # bool [answer length]
    """True on tokens that the policy drew, False on those of an environment; None if the policy drew all."""
    rows: tuple[int, ...] = ()
    """Numbers of answer tokens after which a new row begins, which an engine was given in place of all tokens before:
    first its prompt, up to the next token that the policy drew. () for an answer of one row.

    Example:
        rows=(3,), mask=[True, False, True, False, False, False, True]: the second row has a prompt of three tokens."""
    routes: np.ndarray | None = None  # uint8 or uint16 [prompt and answer length - 1, layers with experts, k]
    """Experts that computed each token of prompt and answer but the last, the one with the largest weight first; None
    if they were not recorded. float32 [..., 2 k] if their weights were, too: they come after the experts."""

    @property
    def drawn(self) -> int:
        """Number of tokens that the policy drew."""
        return len(self.drawn_ids)

    @property
    def drawn_ids(self) -> np.ndarray:
        """Tokens that the policy drew, int32."""
        return self.token_ids if self.mask is None else self.token_ids[self.mask]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(AnswerTokens):
    """Result of one request, without the tokens of its prompt."""

    finish: Finish
    drafted: int = 0
    """Number of drafts that were compared with the token drawn in their place (rollout.lossless)."""
    agreed: int = 0
    """Number of those that were that token: as many passes were saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of judging one answer with a reward function."""

    reward: float
    """Finite reward; 0.0 whenever the status is not "ok"."""
    status: Status = "ok"
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCredit:
    """Rewards of a trajectory's turns, and what they are worth. The policy drew at least one token in each.

    Example:
        TurnCredit(ends=np.array([5, 9]), rewards=np.array([0.0, 1.0]))
    """

    ends: np.ndarray  # int32 [turns]
    """Number of tokens of the answer up to the turn's last one, which the policy drew; the last is the whole answer.
    The mask alone does not say it: where an environment's text is empty, turns are adjacent."""
    rewards: np.ndarray  # float64 [turns]
    """Reward of each turn. What belongs to the whole trajectory (the verdict of `task.reward`, a length penalty) is
    part of the last one."""
    advantages: np.ndarray | None = None  # float64 [turns]
    """Advantage of each turn's tokens; None if turns have none of their own."""

    def plus(self, amount: float) -> "TurnCredit":
        """Return the same turns with an amount added to the last reward."""
        return replace(self, rewards=np.append(self.rewards[:-1], self.rewards[-1] + amount))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlace:
    """Place of a row in its trajectory."""

    number: int
    """Number of earlier rows."""
    drawn: int
    """Number of tokens that the policy drew in all rows."""
    later: float
    """Sum of the rewards of turns in later rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(AnswerTokens):
    """One judged sample, ready for training: as a whole, or one of its rows (learner.batching.rows_of)."""

    prompt_ids: np.ndarray  # int32
    reward: float
    """The verifier's reward plus any length penalty."""
    advantage: float
    """Advantage of all its tokens; not used if its turns have their own, or a value model gives them."""
    turns: TurnCredit | None = None
    """Turns with an environment; None for an answer of one turn."""
    group: int = 0
    """Group number: the same for all samples of one prompt, unique within the step."""
    watched: bool = False
    """True if the learner is to report its own log-probs of this answer, for inspection."""
    row: RowPlace | None = None
    """Place among the rows of its trajectory; None for a trajectory of one row, and as a whole."""

    @property
    def row_uid(self) -> str:
        """`uid`, and of a later row its number, as in "train-17/0+1"."""
        return row_uid(self.uid, self.row.number if self.row else 0)

    @property
    def length(self) -> int:
        """Number of tokens of prompt and answer together, those of an environment included."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def places(self) -> np.ndarray:
        """Positions in prompt and answer of the tokens that the policy drew, int64 [drawn]."""
        drawn = np.arange(len(self.token_ids)) if self.mask is None else np.flatnonzero(self.mask)
        return len(self.prompt_ids) + drawn

    @property
    def drawn_ends(self) -> np.ndarray:
        """Number of tokens that the policy drew up to the end of each turn, integers [turns]."""
        ends = np.array([len(self.token_ids)]) if self.turns is None else self.turns.ends
        return ends if self.mask is None else np.searchsorted(np.flatnonzero(self.mask), ends)

    @property
    def turn_lengths(self) -> np.ndarray:
        """Number of tokens that the policy drew in each turn, integers [turns]."""
        return np.diff(self.drawn_ends, prepend=0)


def row_uid(uid: str, number: int) -> str:
    """Return the identifier of a row of a trajectory; that of the first is the trajectory's own."""
    return f"{uid}+{number}" if number else uid


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """Description of one parameter as it is sent. Names and shapes are those of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    format: str
    """Name of the quantization format, or "none" for values in full precision."""
    fingerprint: int
    """64-bit sum over the data that an engine must hold after loading (codes and scales, or float32 values)."""
    bytes: int
    """Bytes that are sent: encoded size of a delta or of the whole tensor."""
    changed: int = 0
    """Number of codes that differ from the last version sent; 0 if none was sent in this format, and without codes."""
    base_version: int | None = None
    """Version that the delta is relative to; None if the whole tensor is sent."""
    tied: bool = False
    """True for codes of a tied weight, sent beside the parameter that it shares. In full precision it is sent once."""

    @property
    def float32_bytes(self) -> int:
        """Bytes of this tensor in full precision (float32); 0 if it is tied."""
        return 0 if self.tied else 4 * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """List of all parts of a complete set of weights, or of those that replace parts of another version. Engines refuse
    an incomplete set."""

    version: int
    precision: str
    """Format of the quantized linear layers: "none", "int8", …"""
    weight_max_code: int
    """Largest code of a weight; 63 instead of 127 where the kernel would saturate (AVX2 without VNNI)."""
    tensors: tuple[TensorRecord, ...]
    base_version: int | None = None
    """Version that an engine must hold to apply the deltas among the tensors, or to keep the tensors that a subset does
    not list; None if all tensors are sent whole."""
    complete: bool = True
    """False for a subset: an engine keeps the other tensors of the base version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedBucket:
    """Some tensors of a version in a device's memory, as a direct transport gives them to engines."""

    number: int
    """Number of earlier buckets of the version."""
    items: tuple[tuple[str, str, tuple[tuple[str, tuple[int, ...], int], ...]], ...]
    """(name, format, places of its arrays) of each tensor; a place is a dtype's name, a shape, and an offset in bytes.
    """
    weight_max_code: int
    size: int
    """Bytes."""
    source: Mapping[str, Any]
    """Where engines get the bytes (weights.transports.direct): memory that they open, by device, or a group that they
    join."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Report of a run: the metrics of a step, a warning, the start of a phase."""

    kind: EventKind
    """Type of event. `rewind` withdraws all events after its step; its `totals` are those of that step, None at 0.
    `phase` says what goes on until the next event of a step or an evaluation, after `step` steps."""
    step: int
    message: str = ""
    values: dict = field(default_factory=dict)
