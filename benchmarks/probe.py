"""Do probes of an engine in bfloat16 notice faults? python benchmarks/probe.py (10 minutes).

SmolLM2-135M-Instruct, from the package that `make smollm2` installs, in FP8 (emulated): an engine in bfloat16, and the
learner in float32 through the same codes, as after a sync (weights/floor.py). Nothing is wrong at first; then one fault
at a time is made in the engine's memory. Writes benchmarks/results/probe.{json,md}: for each answer of 16 tokens, the
mean difference of their log-probs. tests/weights/test_floor.py draws from them.
"""

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from engines import SMOLLM2
from shared import RESULTS, machine

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.engines.requests import make_requests
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.learner.learner import make_learner
from qurl_ray.learner.protocol import EnginePrecision
from qurl_ray.policy.gguf import cached_gguf_policy
from qurl_ray.policy.load import load_model
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import QTensor, dequantize
from qurl_ray.rl.corrections import CorrectionSettings
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.types import PolicySpec, Problem, SamplingParams
from qurl_ray.weights.local import quantize_into

FORMAT, PROMPT, ANSWER, SLOTS, SAMPLES = "fp8", 24, 16, 64, 16
Fault = Callable[[list[QuantizedLinear]], None]


def scaled(linears: list[QuantizedLinear], by: float) -> None:
    """Multiply all scales of one linear."""
    linears[len(linears) // 2].scale.mul_(by)


def one_layer(linears: list[QuantizedLinear]) -> None:
    """One linear holds the codes and scales of the layer before."""
    at = len(linears) // 2
    before = [i for i in range(at) if linears[i]._codes.shape == linears[at]._codes.shape][-1]
    linears[at]._codes.copy_(linears[before]._codes)
    linears[at].scale.copy_(linears[before].scale)


def powers_of_two(linears: list[QuantizedLinear]) -> None:
    """All scales are powers of two, as DeepGEMM's are unless it is told otherwise, and codes were made with them."""
    for linear in linears:
        w = dequantize(QTensor(codes=linear._codes, scale=linear.scale, fmt=linear.fmt))
        scale = linear.scale.log2().ceil().exp2()
        codes = (w / scale).clamp(-linear.fmt.weight_max, linear.fmt.weight_max).to(linear.fmt.dtype)
        linear._codes.copy_(codes.float())
        linear.scale.copy_(scale)


FAULTS: dict[str, Fault] = {
    "one scale, a tenth too large": partial(scaled, by=1.1),
    "one scale, twice as large": partial(scaled, by=2.0),
    "one layer": one_layer,
    "powers of two": powers_of_two,
}


def main(
    healthy: Annotated[int, typer.Option(help="Answers while nothing is wrong.")] = 256,
    faulty: Annotated[int, typer.Option(help="Answers with each fault.")] = 64,
    out: Annotated[Path, typer.Option(help="The JSON file; the table goes beside it.")] = RESULTS / "probe.json",
) -> None:
    """Measure the differences of log-probs that probes see, with and without faults."""
    spec = PolicySpec(source=str(cached_gguf_policy(SMOLLM2)), max_length=PROMPT + ANSWER)
    model = load_model(spec)
    settings = ObjectiveSettings(correction=CorrectionSettings(weight="none"), clip_low=0.2, clip_high=0.28)
    learner = make_learner(model, LearnerConfig(), settings, temperature=1.0, total_updates=1)
    engine = TorchEngine(spec, slots=SLOTS, kernel="emulation", dtype=torch.bfloat16)
    config = QuantizationConfig(equalize=False)
    manifest = quantize_into(engine, model, FORMAT, config, unquantized="bfloat16")
    quantized = {record.name for record in manifest.tensors if record.format == FORMAT}
    fmt = next(module.fmt for module in engine._model.modules() if isinstance(module, QuantizedLinear))
    precision = EnginePrecision(fmt=fmt, quantized=quantized, unquantized="bfloat16", kv_cache="full", factors={})
    rng = np.random.default_rng(0)

    def gaps(answers: int) -> list[float]:
        found: list[float] = []
        while len(found) < answers:
            asked, prompts = [], rng.integers(model.config.vocab_size, size=(SLOTS // SAMPLES, PROMPT)).astype(np.int32)
            for uid, prompt in enumerate(prompts, start=len(found)):
                problem = Problem(uid=str(uid), prompt="", answer="")
                sampling = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
                asked += make_requests(
                    [problem], lambda _, p=prompt: p, samples=SAMPLES, sampling=sampling, seed=uid, salt=""
                )
            drawn = engine.generate(asked, version=manifest.version)
            for own, prompt in zip((drawn[at : at + SAMPLES] for at in range(0, SLOTS, SAMPLES)), prompts, strict=True):
                scored = learner.logprobs(own, prompt, precision)
                found += [float(np.abs(c.logprobs - lp).mean()) for c, lp in zip(own, scored, strict=True)]
            print(f"{len(found)} of {answers}", flush=True)
        return found

    figures: dict = {"machine": machine(), "answers": {"nothing": gaps(healthy)}}
    linears = [module for module in engine._model.modules() if isinstance(module, QuantizedLinear)]
    for name, fault in FAULTS.items():
        before = [(linear._codes.clone(), linear.scale.clone()) for linear in linears]
        with torch.no_grad():
            fault(linears)
        figures["answers"][name] = gaps(faulty)
        for linear, (codes, scale) in zip(linears, before, strict=True):
            linear._codes.copy_(codes)
            linear.scale.copy_(scale)
    usual = statistics.mean(figures["answers"]["nothing"])
    lines = ["# Differences of log-probs that a probe sees", "", "`python benchmarks/probe.py`", figures["machine"], ""]
    lines += ["| wrong | mean difference, nats | times as far as usual |", "|---|---|---|"]
    for name, found in figures["answers"].items():
        lines.append(f"| {name} | {statistics.mean(found):.3f} | {statistics.mean(found) / usual:.2f} |")
    print("\n".join(lines))
    figures["answers"] = {name: [round(gap, 4) for gap in found] for name, found in figures["answers"].items()}
    out.write_text(json.dumps(figures) + "\n")
    out.with_suffix(".md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    typer.run(main)
