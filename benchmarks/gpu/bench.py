"""Shared code of the parts: how much is measured, fair timing, the clock, the file of figures."""

import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from qurl_ray.planning.shapes import SHAPES, Shape
from qurl_ray.types import PolicySpec

Call = Callable[[], object]
Figures = dict[str, Any]
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes and repeats of all measurements."""

    shapes: tuple[Shape, ...]
    layers: tuple[int, int] = (1, 3)
    """Numbers of layers of the two timed models. The time of a layer is the slope between the two."""
    rounds: int = 5
    """Rounds in which each call has a turn; a first one to warm up is not counted."""
    batches: tuple[int, ...] = (1, 32, 128, 256)
    """Sequences that an engine decodes at a time."""
    prompt: int = 512
    steps: int = 8
    """Decode steps of one turn."""
    tokens: int = 8192
    """Tokens of a learner's step, and of the products of the unified linear."""
    sample: int = 1024
    """Tokens of one sample of the learner, a quarter of them the prompt's."""
    ragged: tuple[tuple[int, int], ...] = ((520, 648), (528, 656), (640, 1152), (1000, 1001))
    """N, K of further weights, whose widths suit no kernel, one, two or all of them."""
    rows: tuple[int, ...] = (1, 7, 17, 33, 256, 300)


FULL = Scale(shapes=tuple(SHAPES[f"Qwen2.5-{size}"] for size in ("1.5B", "7B", "32B")))
TINY = Scale(
    shapes=(replace(SHAPES["tiny"], vocab=2048),),
    layers=(1, 2),
    rounds=2,
    batches=(1, 3),
    prompt=16,
    steps=2,
    tokens=64,
    sample=32,
    ragged=((40, 56), (100, 101)),
    rows=(1, 7, 33),
)


class Bench:
    """One run of the benchmarks.

    Args:
        minutes: time after which nothing more is started; a measurement that runs then is not interrupted.
        out: the file of figures, which is complete after every figure.
    """

    def __init__(self, *, device: str, scale: Scale, minutes: float, out: Path) -> None:
        self.device, self.scale = torch.device(device), scale
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        """Dtype of tensors that engines do not quantize. CPUs are slow in bfloat16."""
        self.figures: Figures = {"machine": machine(self.device), "errors": {}, "skipped": [], "seconds": {}}
        self._out, self._part = out, ""
        self._ends = self._stops = time.monotonic() + 60 * minutes

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def left(self) -> float:
        """Seconds that are left of the whole run."""
        return self._ends - time.monotonic()

    def part(self, name: str, share: float, measure: Callable[["Bench"], None]) -> None:
        """Measure a part, within its share of the time that is left."""
        started, self._part = time.monotonic(), name
        self._stops = started + share * self.left()
        self.figures[name] = {}
        self.attempt("all of it", lambda: measure(self))
        self.figures["seconds"][name] = time.monotonic() - started
        self._write()

    def attempt(self, key: str, measure: Callable[[], T]) -> T | None:
        """Return the result of `measure`. Return None if it fails or no time is left, and record that in the file."""
        name = f"{self._part}: {key}"
        if time.monotonic() > self._stops:
            self.figures["skipped"].append(name)
            self.say(f"{name}: skipped, no time left")
            return None
        try:
            return measure()
        except Exception as error:  # no memory, no kernel or a bug: the others are still measured
            lines = str(error).strip().splitlines() or [""]
            self.figures["errors"][name] = f"{type(error).__name__}: {lines[0][:400]}"
            self.say(f"{name}: {self.figures['errors'][name]}")
            return None
        finally:
            self._write()

    def free(self) -> None:
        """Free unused memory before something large is built. Modules in a flow refer to themselves, hence gc."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def add(self, key: str, figures: Figures, summary: str) -> None:
        self.figures[self._part][key] = figures
        self._write()
        self.say(f"{self._part}: {key}: {summary}")

    def say(self, line: str) -> None:
        print(f"[{max(0.0, self.left()):4.0f} s left] {line}", flush=True)

    def _write(self) -> None:
        new = self._out.with_name(f"{self._out.name}.new")
        new.write_text(json.dumps(self.figures, indent=2) + "\n")
        new.replace(self._out)

    def take_turns(self, calls: Mapping[K, Call]) -> dict[K, list[float]]:
        """Return the seconds of each call in each round. They take turns, so that a slow moment affects all of them."""
        wait = torch.cuda.synchronize if self.cuda else lambda: None
        found: dict[K, list[float]] = {name: [] for name in calls}
        for counts in (False, *[True] * self.scale.rounds):  # first, libraries choose kernels and allocate memory
            for name, call in calls.items():
                wait()
                started = time.perf_counter()
                call()
                wait()
                if counts:
                    found[name].append(time.perf_counter() - started)
        return found


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Median over the rounds of the speedup of the second over the first."""
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))


def whole(few: float, more: float, layers: tuple[int, int], shape: Shape) -> float:
    """Extrapolate a quantity, such as time, to all layers of the shape, from its values with `layers` layers."""
    return few + (shape.layers - layers[0]) * (more - few) / (layers[1] - layers[0])


@contextmanager
def policy_of(shape: Shape, layers: int, vocabulary: int) -> Iterator[PolicySpec]:
    """Yield the spec of a model of Qwen2's architecture and this shape. It has no saved weights, only initial ones."""
    config = transformers.Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        hidden_size=shape.hidden,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=vocabulary,
        max_position_embeddings=32768,
        tie_word_embeddings=shape.tied,
    )
    with tempfile.TemporaryDirectory(prefix="qurl-shape-") as folder:
        config.save_pretrained(folder)
        yield PolicySpec(source=folder)


def machine(device: torch.device) -> Figures:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    found: Figures = {"date": date.today().isoformat(), **versions, "transformers": transformers.__version__}
    if device.type != "cuda":
        return found | {"device": f"CPU ({platform.machine()}): the kit's logic, no figures of a GPU"}
    own = torch.cuda.get_device_properties(device)
    return found | {"device": own.name, "capability": f"{own.major}.{own.minor}", "gib": own.total_memory / 2**30}
