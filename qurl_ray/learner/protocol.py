"""The interface of a learner, as the training loop uses it."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from qurl_ray.learner.batching import MiniBatch
from qurl_ray.quant.equalize import Factors
from qurl_ray.quant.formats import Format
from qurl_ray.quant.quantize import QTensor
from qurl_ray.quant.units import Unit
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.types import Adapters, Completion

if TYPE_CHECKING:  # the coordinator starts without transformers
    from qurl_ray.learner.backend import Resident
    from qurl_ray.policy.adapters import CodedBase


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one training step on one rank."""

    sums: dict[str, float]
    """Metric sums (rl.objective), to be merged over ranks."""
    seconds: dict[str, float]
    """Wall time of the phases "logprob" and "update", in seconds."""
    grad_norm: float
    """Gradient norm of the last applied update, before clipping; the same on every rank; nan if there was none."""
    lr: float
    skipped_updates: int
    """Number of updates skipped because their gradient was not finite."""
    proximal: dict[str, np.ndarray]
    """Log-probs before the first update of the tokens that the policy drew in the watched samples, by their row_uid,
    float32 [drawn]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrecision:
    """Form in which a weight version was sent, and in which the engines hold keys and values."""

    fmt: Format | None
    quantized: Mapping[str, Unit]
    """Units that were sent as codes, by the names of their parameters."""
    unquantized: Literal["float32", "bfloat16", "float16"]
    """Type in which the other parameters were sent."""
    exact: Set[str] = frozenset()
    """Names of parameters that were sent in float32 all the same."""
    kv_cache: Literal["full", "fp8"] = "full"
    """Precision in which the engines hold keys and values."""
    kv_scales: Literal["head", "layer"] = "head"
    """Number of scales that FP8 keys have, and values: one for each key head of a layer, or one for the layer."""
    factors: Mapping[str, Factors] = field(default_factory=dict)
    """Factors of equalization, by module."""


class Learner(Protocol):
    """A learner, which holds the policy in full precision and updates it.

    Every rank calls the same methods in the same order.
    """

    adapters: Adapters | None
    """Adapters, if these alone are trained; None if all parameters are."""
    coded_base: "CodedBase | None"
    """Codes that take the place of weights for good; None if there are none."""

    def named_parameters(self, *, trained: bool = False) -> Iterator[tuple[str, torch.Tensor | QTensor]]:
        """Yield whole parameters with their checkpoint names, in a fixed order; tied parameters once. Weights that are
        codes for good are yielded as these.

        A sharded parameter is gathered when it is yielded and may be freed at the next: use it at once, on all ranks.

        Args:
            trained: yield only the parameters that are trained.
        """

    def changing_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield, likewise, the parameters that differ from one version to the next: those that are trained, and the
        gains of norms under noise."""

    def end_noise(self) -> bool:
        """Take the noise away from the gains of norms until the next `learn`. Return True if there was some."""

    def factors(self) -> Mapping[str, Factors]:
        """Return the factors with which parameters become codes (quant.equalize), by module; {} if there are none.

        The first call measures them on a fixed sequence of tokens, later ones may return others after `learn`.
        """

    def learn(self, mini_batches: Sequence[MiniBatch]) -> StepResult:
        """Make one update per mini-batch. Proximal log-probs are those of the weights before the first update."""

    def compare_gradients(self, full: Sequence[MiniBatch], rolled: Sequence[MiniBatch]) -> dict[str, float]:
        """Return `certificate/gradient_cosine` and `…_ratio` (evaluation.certificate) of the objective's gradients on
        answers in full precision and as rolled out, without an update. Return nothing where a batch is empty or has no
        gradient, or where gradients of a whole batch are not held in full precision: with several ranks, other backends
        than torch, float16, a unified flow, a value model, or routers."""

    def adopt(self, settings: ObjectiveSettings) -> None:
        """Use these settings of the objective from now on."""

    def logprobs(
        self, completions: Sequence[Completion], prompt_ids: np.ndarray, precision: EnginePrecision
    ) -> list[np.ndarray]:
        """Return log-probs of each answer to one prompt, with the codes that engines hold, float32 [answer length]."""

    def save(self, folder: Path) -> None:
        """Write what `load` needs to resume: parameters, optimizer, position in the schedule, random states."""

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote, with any number of ranks. The caller has verified the files."""

    def keep_on_device(self, resident: "Resident") -> None:
        """Keep this part on the device, and the rest on the host, until the next call. The initial value is ALL, which
        `learn`, `save` and `load` need; `named_parameters` and `logprobs` need PARAMETERS."""
