"""Cost of a weight sync: python benchmarks/sync.py (about 6 minutes), or --quick (4).

SmolLM2-135M-Instruct, from the package that `make smollm2` installs. Learner, sender, engine, probe and fingerprints
are the real ones, in one process. Ray's object store, which would hold the buckets in between, is not part of it. A
step is one of `make smollm2`: 320 answers of 16 tokens after prompts of 40 (dynamic sampling asks for 5 times as many
as it keeps), and 2 updates on 64 of them. Five steps are of this size; the others, of 8 answers, only serve to measure
their deltas.

The 20 steps at lr 1e-6 learn from the policy's own answers with random advantages. For a sync the direction of the
gradient does not matter; how far AdamW moves the weights does. Each step is followed by a sync of INT8 codes: as on one
node, where weights are sent whole, after a step of real size, and as across nodes, as a delta, after the others. Every
sync is probed here; in a run it is each eighth.
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import engines
import numpy as np
import torch
import typer
from matplotlib import pyplot as plt
from shared import machine
from transformers import PreTrainedModel

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.config.run import RunConfig
from qurl_ray.config.sync import SyncConfig
from qurl_ray.engines.requests import probe_requests
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.learner.batching import plan
from qurl_ray.learner.equalizer import Equalizer, equalizer_for
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.learner.protocol import EnginePrecision
from qurl_ray.policy.load import load_model
from qurl_ray.quant.equalize import equalized
from qurl_ray.quant.formats import FORMATS, Format
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.units import units
from qurl_ray.rl.corrections import CorrectionSettings
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.types import Completion, Manifest, Problem, Request, Trajectory
from qurl_ray.weights.local import chosen_codes
from qurl_ray.weights.receiver import decode_buckets
from qurl_ray.weights.stream import Publisher, assemble_manifest, count_codes

LR, SLOTS, PROMPT, ANSWER = 1e-6, 512, 40, 16
ASKED, KEPT, UPDATES = 320, 64, 2
KEEP = QuantizationConfig().keep


@dataclass
class Sync:
    """A learner, its sender and one engine, with times and manifests of all syncs between them."""

    learner: PolicyLearner
    publisher: Publisher
    engine: TorchEngine
    fmt: Format
    probe: list[Request]
    equalizer: Equalizer
    version: int = 0
    took: list[dict[str, float]] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)

    def send(self, *, whole: bool) -> None:
        """Sync once, as weights.sender and weights.gate do it, probe included."""
        marks = [time.perf_counter()]
        base, self.version = None if whole else self.version, self.version + 1
        options = {"version": self.version, "base_version": base, "unquantized": "bfloat16"}
        factors = self.equalizer.factors
        parameters = equalized(self.learner.named_parameters(), factors)
        buckets = list(self.publisher.prepare(parameters, self.fmt, **options))
        marks.append(time.perf_counter())
        manifest = assemble_manifest(self.version, self.fmt, [bucket.records for bucket in buckets])
        self.engine.load(manifest, decode_buckets((b.payloads for b in buckets), manifest, self.engine.resident))
        marks.append(time.perf_counter())
        drawn = self.engine.generate(self.probe, version=self.version)
        precision = EnginePrecision(
            fmt=self.fmt, quantized=self.publisher.quantized, unquantized="bfloat16", factors=factors
        )
        scored = self.learner.logprobs(drawn, self.probe[0].prompt_ids, precision)
        marks.append(time.perf_counter())
        gap = max(float(np.abs(c.logprobs - own).max()) for c, own in zip(drawn, scored, strict=True))
        assert gap < 0.2, f"the probe is off by {gap}"
        names = ("prepare", "load and verify", "probe")
        found = {name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)}
        self.took.append(found | {"gap": gap})
        self.manifests.append(manifest)


def make(spec: Any, model: PreTrainedModel, tokens: int) -> Sync:
    settings = ObjectiveSettings(
        correction=CorrectionSettings(weight="token", cap=2.0, adaptive_clip=True), clip_low=0.2, clip_high=0.28
    )
    config = LearnerConfig(lr=LR, tokens_per_micro_batch=tokens)
    engine = TorchEngine(spec, slots=SLOTS)
    fmt, quantized = chosen_codes(engine, model, "int8", KEEP)
    equalizer = equalizer_for(model, QuantizationConfig(), quantized, {"int8"})
    assert equalizer, "INT8 is equalized by default"
    learner = make_learner(model, config, settings, temperature=1.0, total_updates=100, equalizer=equalizer)
    prompt = np.random.default_rng(0).integers(model.config.vocab_size, size=PROMPT).astype(np.int32)
    problem = Problem(uid="0", prompt="", answer="")
    probe = probe_requests(problem, lambda _: prompt, tokens=RunConfig().probe_tokens, longest=ANSWER, seed=0)
    return Sync(
        learner=learner,
        publisher=Publisher(quantized, bucket_bytes=SyncConfig().bucket_mb << 20),
        engine=engine,
        fmt=fmt,
        probe=probe,
        equalizer=equalizer,
    )


def groups(asked: list[Request], completions: list[Completion], step: int) -> list[list[Trajectory]]:
    """Return one group per answer, with advantages of either sign."""
    rng = np.random.default_rng(step)
    return [
        [
            Trajectory(
                uid=c.uid,
                prompt_ids=r.prompt_ids,
                token_ids=c.token_ids,
                logprobs=c.logprobs,
                reward=0.0,
                advantage=float(rng.normal()),
                versions=c.versions,
            )
        ]
        for r, c in zip(asked, completions, strict=True)
    ]


def quantize_seconds(model: PreTrainedModel, repeats: int) -> float:
    """Seconds to quantize all linears in the model's blocks, one after the other."""
    weights = [model.get_parameter(name) for name in units(model, KEEP)]
    calls = {"int8": lambda: [quantize(weight, FORMATS["int8"]) for weight in weights]}
    return statistics.median(engines.take_turns(calls, repeats + 1)["int8"][1:])


def full_ratios(manifest: Manifest) -> tuple[float, float]:
    """Bytes of a full send over those in float32: of the quantized linears, and of the whole policy."""
    linears = [record for record in manifest.tensors if record.format != "none"]
    return tuple(
        sum(r.bytes for r in records) / sum(r.float32_bytes for r in records) for records in (linears, manifest.tensors)
    )


def draw(deltas: list[float], parts: dict[str, float], step: float, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), constrained_layout=True)
    left.plot(range(1, len(deltas) + 1), deltas, marker="o", color="#0072B2")
    left.axhline(0.05, color="#777777", linestyle="--", label="1/20")
    left.set(title="Bytes of each delta", xlabel="step", ylabel="of a full send in bfloat16", yscale="log")
    left.legend()
    right.barh(list(parts), [seconds / step for seconds in parts.values()], color="#009E73")
    right.invert_yaxis()
    right.set(title="Seconds of a sync", xlabel="of a step")
    right.bar_label(right.containers[0], fmt="{:.2%}", padding=3)
    right.margins(x=0.2)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main(
    quick: Annotated[bool, typer.Option(help="Time 3 whole steps, not 5.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file, a picture beside it.")] = None,
    steps: Annotated[int, typer.Option(help="Updates, each followed by a sync.")] = 20,
) -> None:
    """Print bytes and seconds of weight syncs."""
    print(f"{machine()}; {torch.get_num_threads()} threads", flush=True)
    spec, model = engines.smollm2()
    seconds = quantize_seconds(model, 5)
    del model
    sync = make(spec, load_model(spec), tokens=4096)
    sync.send(whole=True)
    linears, whole = full_ratios(sync.manifests[0])
    vocabulary = sync.engine._model.config.vocab_size
    whole_steps, step_seconds, deltas = 3 if quick else 5, [], []
    for step in range(1, steps + 1):
        real = step <= whole_steps
        asked = engines.requests(vocabulary, [ANSWER] * (ASKED if real else 8), PROMPT)
        started = time.perf_counter()
        answers = sync.engine.generate(asked, version=sync.version)
        shares = plan(groups(asked, answers, step)[:KEPT], updates=UPDATES, ranks=1, token_budget=4096, seed=step)
        sync.learner.learn(shares[0])
        sync.send(whole=real)
        if real:
            step_seconds.append(time.perf_counter() - started)
        manifest = sync.manifests[-1]
        sent = sum(record.bytes for record in manifest.tensors)
        ratio = 2 * sent / sum(record.float32_bytes for record in manifest.tensors)
        if not real:
            deltas.append(ratio)
        codes, changed = count_codes(manifest.tensors)
        print(
            f"step {step}/{steps}: {sent / 1e6:.2f} MB, {ratio:.4f} of a full send in bfloat16, "
            f"{changed.total() / codes.total():.3%} of the codes changed; "
            + ", ".join(f"{name} {value:.2g}" for name, value in sync.took[-1].items()),
            flush=True,
        )
    parts = {
        name: statistics.median(took[name] for took in sync.took[1 : 1 + whole_steps])
        for name in ("prepare", "load and verify", "probe")
    }
    per_step = statistics.median(step_seconds)
    usual = parts | {"probe": parts["probe"] / SyncConfig().probe_every}
    figures = {
        "full_sync_bytes_ratio": linears,
        "delta_sync_bytes_ratio": statistics.mean(deltas),
        "sync_share_of_step": sum(usual.values()) / (per_step - parts["probe"] + usual["probe"]),
        "quantize_seconds": seconds,
        "full_sync_bytes_ratio_whole_model": whole,
        "sync_seconds": parts,
        "step_seconds": per_step,
        "probe_gap": max(took["gap"] for took in sync.took),
        "delta_sync_bytes_ratios": deltas,
    }
    print(f"\n| INT8, SmolLM2-135M, {steps} steps at lr {LR:g} | |\n|---|---|")
    for name, value in (
        ("full send over float32, quantized linears", f"{linears:.4f}"),
        ("full send over float32, whole policy (the rest in bfloat16)", f"{whole:.4f}"),
        ("delta over a full send in bfloat16, whole policy, mean of the steps", f"1/{1 / statistics.mean(deltas):.0f}"),
        ("sync with verification, of a step", f"{figures['sync_share_of_step']:.2%}"),
        ("its parts, s", ", ".join(f"{name} {value:.2f}" for name, value in parts.items())),
        ("a step, s", f"{per_step:.1f}"),
        ("quantizing all linears, s", f"{seconds:.2f}"),
        ("largest log-prob gap of a probe", f"{figures['probe_gap']:g}"),
    ):
        print(f"| {name} | {value} |")
    if out:
        engines.write(out, figures)
        draw(deltas, usual, per_step, out.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
