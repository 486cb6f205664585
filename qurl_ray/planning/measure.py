"""The machine at hand instead of a data sheet: times this package's own engine and learner for some seconds.

A few decode steps, a prefill, passes over a few sequences and one sync are timed; a step's phases are counted from
them, with the formulas that plans for GPUs use. Weights are random, and have the model's shape.
"""

import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from qurl_ray.config.models import LearnerConfig, QuantizationConfig
from qurl_ray.errors import ConfigError
from qurl_ray.learner.batching import plan as share_out
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.learner.probe import Codes
from qurl_ray.planning.phases import rollout_s
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.workload import Workload
from qurl_ray.policy.load import empty_model, tied_head
from qurl_ray.quant.formats import Format, get_format
from qurl_ray.quant.select import quantized_parameters
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.rollout.torch_engine import TorchEngine
from qurl_ray.sync.publish import Publisher, Unquantized, assemble
from qurl_ray.sync.receive import unpack
from qurl_ray.types import Completion, PolicySpec, Request, SamplingParams, Trajectory

FORMATS = ("none", "int8")
LARGEST = 2e9
"""Parameters of a model that is measured here."""
_TIMES = 3  # of each timing; the median counts
_STEPS = 4  # decode steps of one timing
_CONTEXT, _HELD_TOKENS = 1024, 8192  # of a sequence and of a batch, at most
_PASS_TOKENS = 512  # of the larger timed pass: some seconds at 135 M parameters
_MESSAGES = 128
_PROBES, _PROBE_TOKENS, _PROBE_PROMPT = 2, 4, 24  # as loop.coordinator.collect and sync.probe_tokens have it


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds that grow with an amount: fixed + each · amount."""

    fixed: float
    each: float

    def at(self, amount: float) -> float:
        return self.fixed + self.each * amount

    @classmethod
    def through(cls, few: tuple[float, float], many: tuple[float, float]) -> "Line":
        """(amount, seconds) of two timings. Neither part is negative."""
        (less, fast), (more, slow) = few, many
        each = max(0.0, (slow - fast) / (more - less)) if more > less else slow / more
        return cls(fixed=max(0.0, fast - each * less), each=each)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEngine:
    """Speed of an engine in one format (planning.phases.Decoding), with the context that it was timed with."""

    steps: tuple[tuple[float, float], ...]
    """(sequences, seconds) of a decode step, ascending."""
    prefill: Line
    """Of prompt tokens."""

    def decode_s(self, batch: float, context: float) -> float:
        del context
        counts, seconds = zip(*self.steps, strict=True)
        if batch <= counts[-1] or len(counts) == 1:
            return float(np.interp(batch, counts, seconds))
        return Line.through(*self.steps[-2:]).at(batch)

    def kv_of(self, context: float) -> float:
        return 0.0  # a machine's memory is for slots

    def prefill_s(self, prompts: float, length: float) -> float:
        return self.prefill.at(prompts * length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found, for one shape and lengths."""

    engines: dict[str, MeasuredEngine]
    """By format of `FORMATS`."""
    score: Line
    """Of tokens: a pass without gradients, and one whose log-probs are kept."""
    update: Line
    """Of tokens: forward, backward and the optimizer's step."""
    sync: dict[str, float]
    message: float
    """Of an answer: its request and itself are written and read again, on their way to an engine and back."""
    seconds: float
    """That the measuring took."""

    def phases(self, work: Workload, format_name: str) -> dict[str, float]:
        """Seconds of a step's phases, named as in metrics.jsonl, where engine and learner take turns."""
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
    """Time engine and learner on all cores of this machine.

    Raises:
        ConfigError: the model is too large for that.
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
            spec = _spec(shape, work, Path(folder))
            learner = _learner(spec, work)
            score, update = _passes(learner, shape, work)
            engines, syncs = {}, {}
            for name in formats:
                link = _Link(spec, work, learner, name)
                engines[name] = _decoding(link.engine, shape, work)
                syncs[name] = link.seconds()
            message = _message(link.engine, shape, work)
    finally:
        torch.set_num_threads(threads)
    taken = time.perf_counter() - started
    return Machine(engines=engines, score=score, update=update, sync=syncs, message=message, seconds=taken)


def _spec(shape: Shape, work: Workload, folder: Path) -> PolicySpec:
    """A Llama of that shape, on disk as a config.json."""
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


def _median(call: Callable[[], object], *, warm: bool = False) -> float:
    """Seconds that `call` takes; `warm` calls it once before."""
    if warm:
        call()
    found = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


# --- the engine ----------------------------------------------------------------------------------


def _decoding(engine: TorchEngine, shape: Shape, work: Workload) -> MeasuredEngine:
    """Decode steps of one sequence, a quarter of a batch and all of it, and prefills of their prompts."""
    drawn = max(1, round(work.answer / 2))  # so many tokens a sequence has when a step is timed
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
    # There and back Ray takes about twice as long as a deep copy, which reads and makes the same objects.
    return 2 * _median(partial(copy.deepcopy, both), warm=True) / _MESSAGES


def _requests(shape: Shape, count: int, samples: int, prompt: int, tokens: int) -> list[Request]:
    """`samples` answers to each prompt, of exactly `tokens` tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(shape.vocab, size=prompt).astype(np.int32) for _ in range(-(-count // samples))]
    return [
        Request(
            uid=f"{index}/0",
            prompt_ids=prompts[index // samples],
            seed=index,
            sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True),
        )
        for index in range(count)
    ]


# --- the learner ---------------------------------------------------------------------------------


def _learner(spec: PolicySpec, work: Workload) -> PolicyLearner:
    torch.manual_seed(0)
    config = LearnerConfig(gradient_checkpointing=work.checkpointing, tokens_per_micro_batch=work.micro_tokens)
    settings = ObjectiveSettings(clip_low=0.2, clip_high=0.28)
    return make_learner(empty_model(spec), config, settings, temperature=1.0, total_updates=100)


def _passes(learner: PolicyLearner, shape: Shape, work: Workload) -> tuple[Line, Line]:
    """(scoring, updating), each of a few sequences and of a mini-batch or what of it _PASS_TOKENS hold."""
    each = sum(_lengths(work))
    most = max(2, min(work.sequences // work.updates, _PASS_TOKENS // each))
    scored: list[tuple[float, float]] = []
    updated: list[tuple[float, float]] = []
    for count in (max(1, most // 4), most):
        groups = [[_trajectory(shape, work, index)] for index in range(2 * count)]
        (batches,) = share_out(groups, updates=2, ranks=1, token_budget=work.micro_tokens, seed=0)
        if not scored:
            learner.learn(batches)  # the first of all takes longer
        found = [learner.learn(batches).seconds for _ in range(_TIMES)]
        scored.append((count * each, statistics.median(seconds["logprob"] for seconds in found)))
        updated.append((count * each, statistics.median(seconds["update"] for seconds in found) / 2))
    return Line.through(*scored), Line.through(*updated)


def _lengths(work: Workload) -> tuple[int, int]:
    """(prompt, answer) of the sequences that are passed, which are short ones where the step has long ones."""
    return min(work.prompt, _PASS_TOKENS // 4), min(max(1, round(work.answer)), _PASS_TOKENS // 4)


def _trajectory(shape: Shape, work: Workload, index: int) -> Trajectory:
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


class _Link:
    """A learner, a publisher and an engine in one process."""

    def __init__(self, spec: PolicySpec, work: Workload, learner: PolicyLearner, format_name: str) -> None:
        self.engine = TorchEngine(spec, slots=work.slots)
        self._learner, self._delta, self._version = learner, work.delta, 0
        self._moved = work.lr * work.updates
        self._fmt: Format | None = None
        names: set[str] = set()
        if format_name != "none":
            self._fmt = get_format(format_name, self.engine.weight_max_code(format_name))
            names = quantized_parameters(empty_model(spec), QuantizationConfig().keep)
        tied = tied_head(learner._policy.module.policy)
        self._publisher = Publisher(quantized=names, tied=tied)
        self._unquantized: Unquantized = "bfloat16" if self._fmt else "float32"
        self._probe = _requests_of_probe(work)
        self._send()

    def seconds(self) -> float:
        """Of one sync with its probe, each weight having moved by about the learning rate in each update."""
        found = []
        for _ in range(_TIMES):
            with torch.no_grad():
                for _, parameter in self._learner.named_parameters():
                    parameter.add_(torch.empty_like(parameter).uniform_(-1, 1), alpha=self._moved)
            started = time.perf_counter()
            self._send()
            completions = self.engine.generate(self._probe, version=self._version)
            codes = Codes(fmt=self._fmt, quantized=self._publisher.quantized, unquantized=self._unquantized)
            self._learner.logprobs(completions, self._probe[0].prompt_ids, codes)
            found.append(time.perf_counter() - started)
        return statistics.median(found)

    def _send(self) -> None:
        base = self._version if self._delta and self._version else None
        self._version += 1
        buckets = list(
            self._publisher.prepare(
                self._learner.named_parameters(),
                self._fmt,
                version=self._version,
                base_version=base,
                unquantized=self._unquantized,
            )
        )
        manifest = assemble(self._version, self._fmt, [bucket.records for bucket in buckets])
        self.engine.load(manifest, unpack((bucket.payloads for bucket in buckets), manifest, self.engine.resident))


def _requests_of_probe(work: Workload) -> list[Request]:
    ids = np.ones(min(work.prompt, _PROBE_PROMPT), dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=min(_PROBE_TOKENS, work.response), ignore_eos=True)
    return [Request(uid=f"probe/{i}", prompt_ids=ids, seed=i, sampling=sampling) for i in range(_PROBES)]
