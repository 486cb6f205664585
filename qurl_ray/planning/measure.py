"""Measure this machine instead of reading a data sheet: time this package's own engine and learner for some seconds.

A few decode steps, a prefill, passes over a few sequences and one sync are timed. The phases of a step are computed
from these timings, with the formulas that plans for GPUs use. Weights are random, and have the model's shape.
`measure_host` times what hosts compute in a sync, which plans for GPUs use as well.
"""

import copy
import gc
import json
import mmap
import os
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.config.run import RunConfig
from qurl_ray.engines.requests import make_requests, probe_requests
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.errors import ConfigError
from qurl_ray.learner.batching import plan as share_out
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.learner.protocol import EnginePrecision
from qurl_ray.planning.machines import Host
from qurl_ray.planning.phases import rollout_s
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.workload import Workload
from qurl_ray.policy.load import empty_model, tied_head
from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import Format, get_format
from qurl_ray.quant.linear import QuantizedLinear, weight_max_code
from qurl_ray.quant.quantize import quantize
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.types import Completion, PolicySpec, Problem, Request, SamplingParams, Trajectory
from qurl_ray.weights.delta import encode_delta
from qurl_ray.weights.local import chosen_codes, send_into
from qurl_ray.weights.stream import Publisher, Unquantized

FORMATS = ("none", "int8")
LARGEST = 2e9
"""Largest number of parameters of a model that is measured."""
_TIMES = 3  # repetitions of each timing; the median counts
_STEPS = 4  # decode steps in one timing
_CONTEXT, _HELD_TOKENS = 1024, 8192  # most tokens of a sequence and of a batch
_PASS_TOKENS = 512  # tokens of the larger timed pass: some seconds at 135 M parameters
_MESSAGES = 128
_CHANGED = 0.01  # share of codes that change between two versions that a delta is timed with
_WEIGHT, _HOST_TIMES = (8192, 4096), 5  # shape of the weight on which a host is timed, beyond caches, and repetitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds as a linear function of an amount: fixed + each · amount."""

    fixed: float
    each: float

    def at(self, amount: float) -> float:
        return self.fixed + self.each * amount

    @classmethod
    def through(cls, few: tuple[float, float], many: tuple[float, float]) -> "Line":
        """Return the line through two timings, each (amount, seconds). Neither coefficient is negative."""
        (less, fast), (more, slow) = few, many
        each = max(0.0, (slow - fast) / (more - less)) if more > less else slow / more
        return cls(fixed=max(0.0, fast - each * less), each=each)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEngine:
    """Measured speed of an engine in one format, at the context of the timings. Implements planning.phases.Decoding."""

    steps: tuple[tuple[float, float], ...]
    """Timings of a decode step, each (sequences, seconds), in ascending order."""
    prefill: Line
    """Seconds of a prefill, by number of prompt tokens."""

    def decode_s(self, batch: float, context: float) -> float:
        del context
        counts, seconds = zip(*self.steps, strict=True)
        if batch <= counts[-1] or len(counts) == 1:
            return float(np.interp(batch, counts, seconds))
        return Line.through(*self.steps[-2:]).at(batch)

    def kv_of(self, context: float) -> float:
        return 0.0  # memory does not limit sequences: only slots do

    def prefill_s(self, prompts: float, length: float) -> float:
        return self.prefill.at(prompts * length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Timings of a machine for one model shape and the lengths of one workload."""

    engines: dict[str, MeasuredEngine]
    """Measured engine of each format in `FORMATS`."""
    score: Line
    """Seconds of a pass without gradients that computes log-probs, by number of tokens."""
    update: Line
    """Seconds of one update, by number of tokens: forward, backward and the optimizer's step."""
    sync: dict[str, float]
    message: float
    """Seconds per answer to serialize and deserialize it and its request, on the way to an engine and back."""
    seconds: float
    """Duration of the measurement, in seconds."""

    def phases(self, work: Workload, format_name: str) -> dict[str, float]:
        """Return the seconds of each phase of a step, named as in metrics.jsonl. Engine and learner take turns."""
        engine, tokens = self.engines[format_name], work.tokens / work.updates
        scored = (work.updates - 1) * self.score.at(tokens) + (work.reference + work.critic) * self.score.at(
            work.tokens
        )
        drawing = sum(rollout_s(engine, work, drawn, work.slots) for drawn in work.rounds)
        return {
            "rollout": drawing + work.drawn * self.message,
            "logprob": scored,
            "update": work.updates * self.update.at(tokens) * (2 if work.critic else 1),
            "sync": self.sync[format_name],
        }


def measure(shape: Shape, work: Workload, formats: Sequence[str] = FORMATS) -> Machine:
    """Time the engine and the learner on all cores of this machine.

    Raises:
        ConfigError: the model has more than `LARGEST` parameters.
    """
    if shape.params > LARGEST:
        raise ConfigError(
            f"{shape.name} has {shape.params / 1e9:.1f} B parameters: --measure is for up to {LARGEST / 1e9:g} B; "
            "plan for a --gpu instead"
        )
    started, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        with tempfile.TemporaryDirectory(prefix="qurl-shape-") as folder:
            spec = shape_spec(shape, work, Path(folder))
            torch.manual_seed(0)
            model = empty_model(spec)
            config = LearnerConfig(gradient_checkpointing=work.checkpointing, tokens_per_micro_batch=work.micro_tokens)
            settings = ObjectiveSettings(clip_low=0.2, clip_high=0.28)
            learner = make_learner(model, config, settings, temperature=1.0, total_updates=100)
            score, update = _passes(learner, shape, work)
            engines, syncs = {}, {}
            for name in formats:
                engine = TorchEngine(spec, slots=work.slots)
                fmt, quantized = chosen_codes(engine, model, name, QuantizationConfig().keep)
                link = _Link(engine, learner, Publisher(quantized, tied=tied_head(model)), fmt, work)
                engines[name] = _decoding(engine, shape, work)
                syncs[name] = link.seconds()
            message = _message(engine, shape, work)
    finally:
        torch.set_num_threads(threads)
    taken = time.perf_counter() - started
    return Machine(engines=engines, score=score, update=update, sync=syncs, message=message, seconds=taken)


def shape_spec(shape: Shape, work: Workload, folder: Path) -> PolicySpec:
    """Write the config.json of a Llama with this shape to `folder`, and return its spec."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": max(2 * _CONTEXT, work.prompt + work.response + 1),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return PolicySpec(source=str(folder))


def _median(call: Callable[[], object], *, warm: bool = False, times: int = _TIMES) -> float:
    """Median seconds of `call`; with `warm` it is called once before the timing."""
    if warm:
        call()
    # timeit turns the garbage collector off, and a run has it on
    return statistics.median(timeit.repeat(call, gc.enable, number=1, repeat=times))


# --- the engine ----------------------------------------------------------------------------------


def _decoding(engine: TorchEngine, shape: Shape, work: Workload) -> MeasuredEngine:
    """Time decode steps of one sequence, a quarter of a batch and a whole batch, and the prefills of their prompts."""
    drawn = max(1, round(work.answer / 2))  # tokens that a sequence has drawn when its step is timed
    prompt = min(_CONTEXT, max(1, work.prompt + drawn - _STEPS))
    most = int(min(work.slots, work.rounds[0], max(1, _HELD_TOKENS // prompt)))
    steps, prefills = [], []
    for count in sorted({1, max(1, most // 4), most}):
        short, long = (_requests(shape, count, work.samples, prompt, tokens) for tokens in (2, 2 + _STEPS))
        first, whole = (_median(partial(_generate, engine, r), warm=True) for r in (short, long))
        step = max(1e-9, (whole - first) / _STEPS)
        steps.append((float(count), step))
        prefills.append((float(prompt * -(-count // work.samples)), max(0.0, first - step)))
    return MeasuredEngine(steps=tuple(steps), prefill=Line.through(prefills[0], prefills[-1]))


def _generate(engine: TorchEngine, requests: list[Request]) -> list[Completion]:
    assert engine.version is not None
    return engine.generate(requests, version=engine.version)


def _message(engine: TorchEngine, shape: Shape, work: Workload) -> float:
    requests = _requests(shape, _MESSAGES, work.samples, min(work.prompt, _CONTEXT), 1)
    both = requests, _generate(engine, requests)
    # A round trip through Ray takes about twice as long as a deep copy, which reads and creates the same objects.
    return 2 * _median(partial(copy.deepcopy, both), warm=True) / _MESSAGES


def _requests(shape: Shape, count: int, samples: int, prompt: int, tokens: int) -> list[Request]:
    """Return `count` requests: `samples` for each random prompt, for answers of exactly `tokens` tokens."""
    rng = np.random.default_rng(0)
    problems = [Problem(uid=str(index), prompt="", answer="") for index in range(-(-count // samples))]
    requests = make_requests(
        problems,
        lambda _: rng.integers(shape.vocab, size=prompt).astype(np.int32),
        samples=samples,
        sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True),
        seed=0,
        salt="measure",
    )
    return requests[:count]


# --- the learner ---------------------------------------------------------------------------------


def _passes(learner: PolicyLearner, shape: Shape, work: Workload) -> tuple[Line, Line]:
    """Return the lines of (scoring, updating) by number of tokens.

    Timed with a mini-batch, or the part of it that fits into `_PASS_TOKENS`, and with a quarter of that.
    """
    each = sum(_lengths(work))
    most = max(2, min(work.sequences // work.updates, _PASS_TOKENS // each))
    scored: list[tuple[float, float]] = []
    updated: list[tuple[float, float]] = []
    for count in (max(1, most // 4), most):
        groups = [[trajectory(shape, work, index)] for index in range(2 * count)]
        (batches,) = share_out(groups, updates=2, ranks=1, token_budget=work.micro_tokens, seed=0)
        if not scored:
            learner.learn(batches)  # the first call takes longer, and is not timed
        found = [learner.learn(batches).seconds for _ in range(_TIMES)]
        scored.append((count * each, statistics.median(seconds["logprob"] for seconds in found)))
        updated.append((count * each, statistics.median(seconds["update"] for seconds in found) / 2))
    return Line.through(*scored), Line.through(*updated)


def _lengths(work: Workload) -> tuple[int, int]:
    """Return (prompt, answer) lengths of the timed sequences. They are shorter than the step's if those are long."""
    return min(work.prompt, _PASS_TOKENS // 4), min(max(1, round(work.answer)), _PASS_TOKENS // 4)


def trajectory(shape: Shape, work: Workload, index: int) -> Trajectory:
    """Return a sequence of random tokens, of the lengths that are timed."""
    rng, (prompt, answer) = np.random.default_rng(index), _lengths(work)
    return Trajectory(
        uid=f"{index}/0",
        prompt_ids=rng.integers(shape.vocab, size=prompt).astype(np.int32),
        token_ids=rng.integers(shape.vocab, size=answer).astype(np.int32),
        logprobs=np.full(answer, -float(np.log(shape.vocab)), dtype=np.float32),
        reward=1.0,
        advantage=1.0 - 2 * (index % 2),
        versions=np.zeros(answer, dtype=np.int32),
        group=index,
    )


# --- the sync ------------------------------------------------------------------------------------


def measure_host() -> Host:
    """Time what a host computes in a sync, on a weight that no cache holds."""
    threads = os.cpu_count() or 1
    weight = torch.randn(_WEIGHT) * 0.02
    q = quantize(weight, get_format("int8", weight_max_code(get_format("int8"), weight.device)))
    codes = q.codes.view(torch.uint8).numpy()
    others, moved, size = codes.copy(), codes + (np.random.default_rng(0).random(codes.shape) < _CHANGED), weight.nbytes
    delta = encode_delta(codes, moved)
    assert delta, "so few changes are packed"
    rounded, copied, flat = weight.to(torch.bfloat16).float, weight.clone(), weight.numpy().reshape(-1)

    def rate(amount: float, call: Callable[[], object]) -> float:
        return amount / _median(call, warm=True, times=_HOST_TIMES)

    return Host(
        quantize=rate(size, lambda: quantize(weight, q.fmt)),
        fingerprint=rate(size, lambda: fingerprint(weight)),
        compare=rate(codes.nbytes, lambda: np.count_nonzero(codes != others)),
        copy=rate(size, lambda: copied.copy_(weight)),
        put=rate(size, lambda: np.copyto(np.frombuffer(mmap.mmap(-1, size), np.float32), flat)),
        changes=rate(delta.nbytes, lambda: encode_delta(codes, moved)),
        convert=rate(size, rounded),
        pack=rate(codes.nbytes, lambda: QuantizedLinear(q, None).resident()),
        threads=threads,
    )


class _Link:
    """A learner, a publisher and an engine in one process."""

    def __init__(
        self, engine: TorchEngine, learner: PolicyLearner, publisher: Publisher, fmt: Format | None, work: Workload
    ) -> None:
        self._engine, self._learner, self._publisher, self._fmt = engine, learner, publisher, fmt
        self._delta, self._version = work.sends_changes(nodes=1), 0
        self._probe_every = work.probe_every
        self._moved = work.lr * work.updates
        self._unquantized: Unquantized = "bfloat16" if self._fmt else "float32"
        self._probe = probe_requests(
            Problem(uid="0", prompt="", answer=""),
            lambda _: np.ones(work.prompt, dtype=np.int32),
            tokens=RunConfig().probe_tokens,
            longest=work.response,
            seed=0,
        )
        self._send()

    def seconds(self) -> float:
        """Median seconds of one sync with its share of a probe, after each weight moved by about the learning rate per
        update."""
        found = []
        for _ in range(_TIMES):
            with torch.no_grad():
                for _, parameter in self._learner.named_parameters():
                    parameter.add_(torch.empty_like(parameter).uniform_(-1, 1), alpha=self._moved)
            started = time.perf_counter()
            self._send()
            sent = time.perf_counter()
            completions = self._engine.generate(self._probe, version=self._version)
            precision = EnginePrecision(
                fmt=self._fmt, quantized=self._publisher.quantized, unquantized=self._unquantized
            )
            self._learner.logprobs(completions, self._probe[0].prompt_ids, precision)
            found.append(sent - started + (time.perf_counter() - sent) / self._probe_every)
        return statistics.median(found)

    def _send(self) -> None:
        base = self._version if self._delta and self._version else None
        self._version += 1
        send_into(
            self._publisher,
            self._engine,
            self._learner.named_parameters(),
            self._fmt,
            version=self._version,
            base_version=base,
            unquantized=self._unquantized,
        )
