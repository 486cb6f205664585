"""Are the weights that an engine computes with those that it loaded last? Under CUDA graphs, where there is a GPU.

An engine loads some versions one after the other. Its log-probs of the last one are compared with those of a fresh
engine, which loaded nothing else, request by request; if something that a graph had captured were replaced, they would
be of another version. The learner scores the answers of every version through the same codes, as after a sync: these
differences are what probes see (qurl_ray/weights/floor.py). Beside them is the difference that stale weights would
make.
"""

import statistics
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.bench import Bench, Figures, lacks
from benchmarks.gpu.child import call
from benchmarks.gpu.engines import CONFIG, Setup, random_policy, setup_of
from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.learner import make_learner
from qurl_ray.learner.protocol import EnginePrecision
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.units import units
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.types import Completion, Request, SamplingParams
from qurl_ray.weights.local import quantize_into

PROMPT, ANSWER, ALONE = 24, 16, 8
"""Tokens of a prompt and of an answer; answers that are drawn one by one."""


def run(bench: Bench) -> None:
    for engine in ("vllm", "torch"):
        if reason := lacks("vllm") if engine == "vllm" else None:
            bench.skip(engine, reason)
            continue
        for name in bench.scale.formats:
            key = f"{engine}, {name}"
            if figures := bench.attempt(key, partial(measured, bench, engine, name)):
                bench.add(key, figures, summary(figures))


def measured(bench: Bench, engine: str, name: str) -> Figures:
    scale, versions = bench.scale, list(range(1, bench.scale.versions + 1))
    with setup_of(
        bench,
        scale.shapes[0],
        scale.layers[1],
        engine=engine,
        format_name=name,
        graphs=bench.cuda,
        context=PROMPT + ANSWER,
        slots=scale.answers,
    ) as setup:
        asked = partial(call, bench, answers, setup=setup.plain(), count=scale.answers)
        loaded, fresh = asked(versions=versions), asked(versions=versions[-1:])
        found = loaded["versions"]
        gaps = {version: scored(bench, setup, loaded, version, version) for version in versions}
        stale = scored(bench, setup, loaded, versions[-1], versions[-2])
    means = [float(gap.mean()) for own in gaps.values() for gap in own]
    last = str(versions[-1])
    return {
        "kernels": loaded["kernels"],
        "graphs": setup.graphs,
        "fresh": compared(found[last]["alone"], fresh["versions"][last]["alone"]),
        "gaps": [round(gap, 6) for gap in sorted(means)],
        "gap_mean": statistics.mean(means),
        "gap_largest": max(float(gap.max()) for own in gaps.values() for gap in own),
        "gap_of_another_version": float(np.concatenate(stale).mean()),
    }


def answers(*, setup: dict[str, Any], versions: list[int], count: int) -> Figures:
    """Return what an engine answers after each load, drawn together, and some drawn one by one. Runs in a process of
    its own."""
    made = Setup(**setup)
    engine = made.make()
    found: Figures = {}
    for version in versions:
        model = random_policy(made.spec, version)
        manifest = quantize_into(engine, model, made.format_name, CONFIG, unquantized=made.dtype)
        asked = requests(model.config.vocab_size, version, count)
        drawn = [engine.generate([request], version=manifest.version)[0] for request in asked[:ALONE]]
        together = engine.generate(asked, version=manifest.version)
        found[str(version)] = {"alone": [plain(c) for c in drawn], "together": [plain(c) for c in together]}
    result = {"versions": found, "kernels": engine.kernels(), "largest_code": engine.weight_max_code(made.format_name)}
    engine.close()
    return result


def requests(vocabulary: int, version: int, count: int) -> list[Request]:
    """Return requests for answers to one random prompt."""
    prompt = np.random.default_rng(version).integers(vocabulary, size=PROMPT).astype(np.int32)
    sampling = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    return [Request(uid=f"0/{i}", prompt_ids=prompt, seed=i, sampling=sampling) for i in range(count)]


def plain(answer: Completion) -> list[list]:
    return [answer.token_ids.tolist(), answer.logprobs.tolist()]


def compared(found: list, expected: list) -> Figures:
    """Compare answers up to where their tokens part: share of all tokens until there, largest difference of
    log-probs."""
    same, largest = 0, 0.0
    for (ids, logprobs), (other_ids, other_logprobs) in zip(found, expected, strict=True):
        parts = next((i for i, pair in enumerate(zip(ids, other_ids, strict=True)) if len(set(pair)) > 1), len(ids))
        same += parts
        off = np.abs(np.array(logprobs[:parts]) - np.array(other_logprobs[:parts]))
        largest = max(largest, float(off.max(initial=0.0)))
    return {"same_tokens": same / (ANSWER * len(found)), "largest_difference": largest}


def scored(bench: Bench, setup: Setup, loaded: Figures, version: int, weights: int) -> list[np.ndarray]:
    """Return the differences of log-probs between the answers of a version and the learner with these weights."""
    model = random_policy(setup.spec, weights)
    precision = EnginePrecision(
        fmt=None if setup.format_name == "none" else get_format(setup.format_name, loaded["largest_code"]),
        quantized={} if setup.format_name == "none" else units(model, CONFIG.keep),
        unquantized=setup.dtype,
    )
    bench.free()
    config = LearnerConfig(device=bench.device.type, compute=setup.dtype)
    settings = ObjectiveSettings(clip_low=0.2, clip_high=0.28)
    learner = make_learner(model, config, settings, temperature=1.0, total_updates=1)
    drawn = loaded["versions"][str(version)]["together"]
    completions = [
        Completion(
            uid=f"0/{i}",
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            versions=np.full(len(ids), version, dtype=np.int32),
            finish="length",
        )
        for i, (ids, logprobs) in enumerate(drawn)
    ]
    prompt = requests(model.config.vocab_size, version, 1)[0].prompt_ids
    expected = learner.logprobs(completions, prompt, precision)
    return [np.abs(c.logprobs - own) for c, own in zip(completions, expected, strict=True)]


def summary(figures: Figures) -> str:
    fresh, way = figures["fresh"], "under graphs" if figures["graphs"] else "eager"
    return (
        f"{way}: {fresh['same_tokens']:.1%} of the tokens are a fresh engine's, {fresh['largest_difference']:.1e} nats "
        f"apart at most; the learner is {figures['gap_mean']:.1e} nats apart on average, "
        f"{figures['gap_of_another_version']:.1e} with the version before"
    )
