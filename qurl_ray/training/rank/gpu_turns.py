"""Turns on GPUs that learner and engines share, and what the learner holds there in each turn.

    LEARN ──updated──► SYNC ──engines hold the new weights──► ROLLOUTS ──they have answered──► LEARN
    all; engines       the parameters; engines                nothing; engines
    sleep              wake up to load them                   generate

So an engine is awake only while no rank holds more than its parameters, which a sync needs. An engine wakes up when it
is asked to load or to generate, and falls asleep when a rank wants to learn (`Coordinator.rest`). Where both fit into
the GPU's memory together (planning.on_gpu), nothing is moved and no engine sleeps. On its own GPUs
(placement=disaggregated) a learner holds everything all the time, unless `learner.offload_while_waiting`.
"""

import time
from enum import Enum

from ray.actor import ActorHandle
from torch import distributed

from qurl_ray.learner.backend import Resident
from qurl_ray.learner.protocol import Learner
from qurl_ray.training.rank.wait import wait


class Turn(Enum):
    LEARN = "learn"
    SYNC = "sync"
    ROLLOUTS = "rollouts"


_COLOCATED = {Turn.LEARN: Resident.ALL, Turn.SYNC: Resident.PARAMETERS, Turn.ROLLOUTS: Resident.NOTHING}


def resident(turn: Turn, *, colocated: bool, offload: bool) -> Resident:
    """Part of the learner that is on its device during a turn.

    Args:
        offload: `learner.offload_while_waiting`.
    """
    if not offload:
        return Resident.ALL
    if colocated:
        return _COLOCATED[turn]
    return Resident.NOTHING if turn is Turn.ROLLOUTS else Resident.ALL


class Turns:
    """Turns of one rank. All ranks take the same turns in the same order.

    The first turn is LEARN: `Coordinator.begin` has put the engines to sleep.

    Args:
        colocated: engines share the learner's GPUs.
        offload: `learner.offload_while_waiting`.
        together: learner and engines stay on the GPUs at the same time.
        timeout_s: deadline for the engines to fall asleep, in seconds.
    """

    def __init__(
        self,
        learner: Learner,
        coordinator: ActorHandle,
        *,
        colocated: bool,
        offload: bool,
        together: bool,
        timeout_s: float,
    ) -> None:
        self._learner, self._coordinator = learner, coordinator
        self._colocated, self._offload, self._timeout_s = colocated, offload and not together, timeout_s
        self._rests = colocated and not together
        self._turn, self._resident = Turn.LEARN, Resident.ALL
        self.seconds = 0.0
        """Seconds that changes of turn took since this was last set to 0."""

    def take(self, turn: Turn) -> None:
        """Change to this turn. Returns when everything that it does not need is off the GPU."""
        if turn is self._turn:
            return
        started = time.perf_counter()
        if self._rests and turn is Turn.LEARN:
            wait(self._coordinator.rest.remote(), self._timeout_s, "the engines to fall asleep")
        wanted = resident(turn, colocated=self._colocated, offload=self._offload)
        if wanted is not self._resident:
            self._learner.keep_on_device(wanted)
            self._resident = wanted
        if self._colocated and turn is Turn.ROLLOUTS and distributed.is_initialized():
            distributed.barrier()  # the first rank that asks starts the engines
        self._turn = turn
        self.seconds += time.perf_counter() - started
