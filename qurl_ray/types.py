"""The records that cross a layer boundary. Nothing here imports the rest of the package, nor torch.

Axis letters used in names and comments, everywhere in qurl_ray:
    P prompts in a step    G samples per prompt    B = P*G sequences
    T tokens of a (padded) sequence    V vocabulary    N, K rows and columns of a weight

Token ids are int32 and log-probs float32 numpy arrays: a tuple of a thousand Python ints costs ten
times as much to send between processes.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Finish = Literal["stop", "length", "cancelled", "deadline"]
"""The last two are cut short: the tokens drawn so far, maybe none."""
Status = Literal["ok", "error", "timeout", "invalid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """Where a policy comes from and how much context it is used with. Small: it travels to every process."""

    source: str
    """Folder, or hub id."""
    max_length: int | None = None
    """Tokens of prompt and answer together; the model's own if None."""
    quantized: bool = False
    """True for a checkpoint of codes (policy/export.py), which engines can hold and nothing can train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One prompt with what is needed to judge an answer to it.

    Example:
        Problem(uid="train-17", prompt="12+34=", answer="46")
    """

    uid: str
    """Unique in the run; seeds and logs refer to it."""
    prompt: str
    answer: str
    meta: dict = field(default_factory=dict)
    """Whatever the task's own scorer wants besides the answer; plain JSON values. A reward function also finds
    `truncated`: True here if the answer that it judges was cut off before its end token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    """Generation ends after one of these; the stop token is part of the answer."""
    ignore_eos: bool = False
    """True generates exactly max_new_tokens, whatever is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sample asked of an engine."""

    uid: str
    """"<problem uid>/<sample index>"."""
    prompt_ids: np.ndarray  # int32 [prompt length]
    seed: int
    """64-bit; token t of the answer is drawn from (seed, t), so worker, order and batch change nothing."""
    sampling: SamplingParams
    """max_new_tokens counts what is still to be drawn."""
    drawn: int = 0
    """Tokens of the answer that prompt_ids already ends with; see rollout.requests.continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns for one request: the tokens that it drew, none of the prompt's."""

    uid: str
    token_ids: np.ndarray  # int32 [answer length]
    logprobs: np.ndarray  # float32 [answer length]
    """Log-prob, in nats, of each token under the distribution it was really drawn from."""
    versions: np.ndarray  # int32 [answer length]
    """Of the weights that drew each token."""
    finish: Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a reward function said of one answer."""

    reward: float
    """Finite; 0.0 whenever the status is not "ok"."""
    status: Status = "ok"
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One judged sample, ready to learn from."""

    uid: str
    prompt_ids: np.ndarray  # int32
    token_ids: np.ndarray  # int32, the answer
    logprobs: np.ndarray  # float32, of the answer under the engine
    reward: float
    """The verifier's reward plus any length penalty."""
    advantage: float
    versions: np.ndarray  # int32, of the answer
    group: int = 0
    """Samples of one prompt have the same, unique within the step."""
    watched: bool = False
    """The learner reports its own log-probs of this answer, to be looked at."""

    @property
    def length(self) -> int:
        """Tokens of prompt and answer together."""
        return len(self.prompt_ids) + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """How one parameter travels. Names and shapes are the checkpoint's."""

    name: str
    shape: tuple[int, ...]
    format: str
    """"none" for values in full precision, else the name of a quantization format."""
    fingerprint: int
    """64-bit sum over what an engine must hold after loading (codes and scales, or float32 values)."""
    bytes: int
    """That travel: of a delta or of the whole tensor, as it is encoded."""
    changed: int = 0
    """Codes (or values) that differ from the version sent before; 0 if there was none in this format."""
    base_version: int | None = None
    """What a delta is added to; None for the whole tensor."""
    tied: bool = False
    """True for codes of a tensor that travels under its own name as well. In full precision it is sent once."""

    @property
    def float32_bytes(self) -> int:
        """What it would take in full precision."""
        return 0 if self.tied else 4 * math.prod(self.shape)

    @property
    def bfloat16_bytes(self) -> int:
        """What a full send in bfloat16 would take."""
        return self.float32_bytes // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a complete set of weights consists of. Engines refuse anything less."""

    version: int
    precision: str
    """Format of the quantized linears: "none", "int8", …"""
    weight_max_code: int
    """Largest code of a weight; 63 instead of 127 where the kernel would saturate (AVX2 without VNNI)."""
    tensors: tuple[TensorRecord, ...]
    base_version: int | None = None
    """What an engine must hold for the deltas among the tensors; None if all are sent whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something the run wants seen: a step's metrics, a warning, a phase that began."""

    kind: Literal["step", "evaluation", "warning", "info", "samples", "prompts", "timeline", "rewind", "summary"]
    """`rewind` takes back all that came after its step."""
    step: int
    message: str = ""
    values: dict = field(default_factory=dict)
