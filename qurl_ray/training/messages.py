"""Records that the driver, the learner's ranks and the coordinator exchange."""

from dataclasses import dataclass, field
from enum import IntEnum

from transformers import PreTrainedTokenizerBase

from qurl_ray.actors.placement import GpuAssignment
from qurl_ray.data.tasks import Task
from qurl_ray.errors import QurlError
from qurl_ray.runs.checkpoint import Checkpoint
from qurl_ray.types import Event

# --- inputs of a run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInputs:
    """Task and tokenizer, for the coordinator. The driver loads them: transformers takes seconds to import,
    and the driver has imported it for its checks."""

    task: Task
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    """Token ids that end an answer."""
    context: int
    """Most tokens of prompt and answer together."""


# --- the guard's decisions, which ranks follow -----------------------------------------------------------------------


class Level(IntEnum):
    """Rungs of the guard's ladder of actions, from the lowest to the highest."""

    NONE = 0
    WARN = 1
    TIGHTEN = 2
    FULL_PRECISION = 3
    STOP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """The guard's decision on how the next step is made.

    Example:
        Directive(level=Level.TIGHTEN, messages=("mismatch/kl 0.3 > 0.1 (3 of the last 5 steps); ...",))
    """

    level: Level = Level.NONE
    messages: tuple[str, ...] = ()
    """Sentences for the log; empty where nothing changes."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step that was judged: `guard/level` after it, and `guard/beyond`, the number of figures beyond
    their limits."""

    @property
    def tighten(self) -> bool:
        """Train with the settings of training.rank.objectives.tightened."""
        return self.level == Level.TIGHTEN

    @property
    def full_precision(self) -> bool:
        """Roll out without quantization; the objective is then the configured one."""
        return self.level == Level.FULL_PRECISION

    @property
    def stop(self) -> bool:
        """Save a checkpoint and end the run."""
        return self.level == Level.STOP


# --- coordinator to ranks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The coordinator's answer to ranks that start, or restart."""

    resume: Checkpoint | None
    """Checkpoint to resume from, its files verified; None for a run from the beginning."""
    version: int
    """Highest weight version that an engine may hold; the ranks' versions must be above it."""
    directive: Directive
    """The guard's directive for the first step."""
    over: bool
    """True if the run has ended with an error: the ranks return."""


@dataclass(frozen=True, slots=True)
class WeightsWanted:
    """Reply in place of an answer: engines wait for the weights that were sent last. The ranks send them again and
    repeat the call."""


# --- coordinator to driver -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """The coordinator's answer to the driver, a few times a second."""

    events: list[Event]
    """All events since the last call."""
    workers: int
    """Number of rollout workers that the fleet knows."""
    ranks_at: tuple[GpuAssignment, ...] | None
    """GPU assignments of the ranks, where a colocated run's workers belong; None until the ranks have started."""
    workers_at: tuple[GpuAssignment, ...] | None
    """GPU assignments of the ranks for which the colocated workers were placed, as far as the coordinator knows; None
    if there are none."""
    failure: QurlError | None
    """Error that ended the run; None if there is none."""
    log: str
    """Path of the coordinator's log."""
