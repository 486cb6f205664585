"""The guard: each step's figures against thresholds, and a ladder of actions with hysteresis.

    none ─► warn ─► tighten ─► full precision ─► stop
      ◄─ calm ─┘◄── calm ─┘◄── K steps over ─┘

The guard goes one rung up when a figure was beyond its threshold in `patience` of the last `window` steps; the count
then restarts, so that the action has time to work. It goes one rung down after `calm_steps` calm steps in a row. Full
precision lasts K steps, since most figures of mismatch mean nothing while it lasts; K doubles with each relapse, and
after `trips` of them the guard stops the run. Pure: others carry out its decisions.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from qurl_ray.config.guard import GuardConfig
from qurl_ray.training.messages import Directive, Level

_MEDIAN_OVER = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """Figure of a step."""

    key: str
    load: float
    """Relative position of the figure: 0 at its ideal, 1 at its threshold."""
    said: str
    """Value and threshold, in words."""


@dataclass(slots=True, kw_only=True)
class _Memory:
    """Complete state on which decisions depend, in types that JSON has."""

    level: int = 0
    trips: int = 0
    left: int = 0
    """Remaining steps in full precision."""
    calm: int = 0
    """Number of calm steps in a row."""
    window: list[dict[str, str]] = field(default_factory=list)
    """Figures that were beyond their thresholds, with their descriptions, for each of the last steps on this rung."""
    norms: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    best: float | None = None
    """Largest mean reward over `window` steps so far."""
    entropies: list[float] = field(default_factory=list)
    """Policy entropies of the first steps."""


class Guard:
    """Judge of a run's steps, one after the other.

    Args:
        can_change_precision: False where rollouts are in full precision anyway, or in the precision of training; the
            rung of full precision is then left out.
    """

    def __init__(self, config: GuardConfig, *, can_change_precision: bool = True) -> None:
        self._config, self._can_change_precision = config, can_change_precision
        self._highest = Level[config.highest.upper()]
        if self._highest == Level.FULL_PRECISION and not can_change_precision:
            self._highest = Level.TIGHTEN
        self._memory = _Memory()

    @property
    def directive(self) -> Directive:
        """Directive that holds now: the last one, without its messages and metrics."""
        return Directive(level=Level(self._memory.level))

    def judge(self, step: int, values: Mapping[str, float]) -> Directive:
        """Return the directive that follows from the figures of a step, which was made under the last directive.

        A figure that is not finite counts as beyond its threshold. An absent one is not checked: a step without any
        update has only rewards and garbage, and is never calm.
        """
        if not self._config.enabled:
            return self.directive
        memory, config = self._memory, self._config
        updated = "mismatch/kl" in values
        readings = list(self._read(values, updated))
        beyond = {reading.key: reading.said for reading in readings if reading.load > 1}
        if updated or beyond:
            memory.window = [*memory.window, beyond][-config.window :]
        if updated:
            calm = all(reading.load <= config.release for reading in readings)
            memory.calm = memory.calm + 1 if calm else 0
        self._remember(values, beyond, updated)
        messages = tuple(f"guard: {text}" for text in self._move(step))
        metrics = {"guard/level": float(memory.level), "guard/beyond": float(len(beyond))}
        return replace(self.directive, messages=messages, metrics=metrics)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in types that JSON has."""
        return asdict(self._memory)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned. If the guard had stopped the run, start at the foot of the
        ladder: a user who resumes such a run wants it to continue."""
        self._memory = _Memory(**state)
        if self._memory.level == Level.STOP:
            self._to(Level.NONE)

    # --- figures --------------------------------------------------------------------------------------------------

    def _read(self, values: Mapping[str, float], updated: bool) -> Iterator[_Reading]:
        """Yield readings of the figures that the step has and that have a threshold."""
        config, memory = self._config, self._memory
        best = memory.best if memory.best is not None and memory.best > 0 else None
        yield from _below("reward/mean", values.get("reward/mean"), config.reward_min, best)
        yield from _above("rollout/garbage_share", values.get("rollout/garbage_share"), config.garbage_max)
        yield from _above("certificate/cost_least", values.get("certificate/cost_least"), config.cost_max)
        if not updated:
            return
        median = statistics.median(memory.norms) if len(memory.norms) >= config.window else math.inf
        start = statistics.fmean(memory.entropies) if len(memory.entropies) >= config.window else None
        clipped = values.get("clip/upper", 0.0) + values.get("clip/lower", 0.0)
        yield from _below("mismatch/ess", values.get("mismatch/ess"), config.ess_min, 1.0)
        yield from _above("mismatch/kl", values["mismatch/kl"], config.kl_max)
        yield from _above("mismatch/max_rho", values.get("mismatch/max_rho"), config.rho_max)
        yield from _above("clip/upper + clip/lower", clipped, config.clip_max)
        yield from _above("grad_norm", values.get("grad_norm"), config.grad_norm_max, median)
        yield from _below("policy/entropy", values.get("policy/entropy"), config.entropy_min, start)

    def _remember(self, values: Mapping[str, float], beyond: Mapping[str, str], updated: bool) -> None:
        """Remember the values with which later figures are compared."""
        memory, window = self._memory, self._config.window
        reward = values.get("reward/mean", math.nan)
        if math.isfinite(reward) and memory.level != Level.FULL_PRECISION:  # full precision gives other rewards
            memory.rewards = [*memory.rewards, reward][-window:]
            if len(memory.rewards) == window:
                mean = statistics.fmean(memory.rewards)
                memory.best = mean if memory.best is None else max(memory.best, mean)
        if not updated:
            return
        norm, entropy = values.get("grad_norm", math.nan), values.get("policy/entropy", math.nan)
        if math.isfinite(norm) and "grad_norm" not in beyond:
            memory.norms = [*memory.norms, norm][-_MEDIAN_OVER:]
        if math.isfinite(entropy) and len(memory.entropies) < window:
            memory.entropies = [*memory.entropies, entropy]

    # --- the ladder -----------------------------------------------------------------------------------------------

    def _move(self, step: int) -> list[str]:
        """Go a rung up or down if it is time. Returns the messages for the log."""
        memory, config = self._memory, self._config
        if memory.level == Level.STOP:
            return []
        # Names and values of the figures that were beyond too often, and how often; empty if there are none.
        counts = Counter(key for beyond in memory.window for key in beyond)
        texts = {key: text for beyond in memory.window for key, text in beyond.items()}
        often = sorted(key for key, count in counts.items() if count >= config.patience)
        steps = f"of the last {len(memory.window)} steps"
        tripped = ", ".join(f"{texts[key]} ({counts[key]} {steps})" for key in often)
        if memory.level == Level.FULL_PRECISION:
            memory.left -= 1
            if memory.left > 0:
                return []
            if tripped:
                return [f"{tripped} even in full precision; {self._relapse(step)}"]
            self._to(Level.TIGHTEN)
            return [f"quantized rollouts again, with a tightened objective until {config.calm_steps} steps are calm"]
        if tripped and memory.level >= self._highest:
            return []  # no higher rung is allowed
        if tripped and memory.level == Level.NONE:
            self._to(Level.WARN)
            return [f"{tripped}; nothing is done about it yet"]
        if tripped and memory.level == Level.WARN:
            self._to(Level.TIGHTEN)
            calm = f"until {config.calm_steps} steps are calm"
            return [f"{tripped}; the objective is tightened, large mismatch masked and clip bounds halved, {calm}"]
        if tripped:
            return [f"{tripped}; {self._relapse(step)}"]
        if memory.level != Level.NONE and memory.calm >= config.calm_steps:
            self._to(Level(memory.level - 1))
            back = "the objective is the configured one again" if memory.level == Level.WARN else "all is well again"
            return [f"{config.calm_steps} calm steps; {back}"]
        return []

    def _relapse(self, step: int) -> str:
        """Act after tightening, or full precision, was not enough. Returns a description of the action."""
        memory, config = self._memory, self._config
        memory.trips += 1
        if memory.trips > config.trips and self._highest == Level.STOP:
            self._to(Level.STOP)
            return f"the run stops, with a checkpoint, after {config.trips} attempts to save it"
        if not self._can_change_precision:
            self._to(Level.TIGHTEN)
            return f"the objective stays tightened (attempt {memory.trips})"
        self._to(Level.FULL_PRECISION)
        memory.left = config.precision_steps * 2 ** (memory.trips - 1)
        return f"rollouts in full precision for {memory.left} steps, to step {step + memory.left}"

    def _to(self, level: Level) -> None:
        """Go to a rung, with all counts reset."""
        memory = self._memory
        if Level.FULL_PRECISION in (level, memory.level):
            memory.rewards = []  # no mean over two formats
        memory.level, memory.calm, memory.window, memory.left = int(level), 0, [], 0
        if level == Level.NONE:
            memory.trips = 0


def _above(key: str, value: float | None, limit: float | None, scale: float = 1.0) -> Iterator[_Reading]:
    """Yield the reading against an upper threshold of `limit` times `scale`; nothing if the scale is 0."""
    if value is None or limit is None or not scale:
        return
    if math.isfinite(value):
        yield _Reading(key=key, load=value / (limit * scale), said=f"{key} {value:.3g} > {limit * scale:.3g}")
    else:
        yield _Reading(key=key, load=math.inf, said=f"{key} {value}")


def _below(key: str, value: float | None, share: float | None, ideal: float | None) -> Iterator[_Reading]:
    """Yield the reading against a lower threshold of `share` times `ideal`; nothing if the ideal is 0."""
    if value is None or share is None or not ideal:
        return
    if math.isfinite(value):
        load = (1 - value / ideal) / (1 - share)
        yield _Reading(key=key, load=load, said=f"{key} {value:.3g} < {share * ideal:.3g}")
    else:
        yield _Reading(key=key, load=math.inf, said=f"{key} {value}")
