"""How long vLLM takes to load a version: python benchmarks/vllm_sync.py (3 minutes).

A Llama of 248 million parameters with random weights, INT8 and full precision, whole and as a delta in which 1 % of the
codes changed. vLLM runs as on CUDA, its core in a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1). Measured is
what an engine does with payloads that have arrived: decode, place in the workers, verify there. What the learner's
ranks do, and Ray's object store, are not part of it (benchmarks/sync.py). Writes vllm_sync.{json,md} to
benchmarks/results.
"""

import json
import os
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from shared import RESULTS, machine
from transformers import LlamaConfig

from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.policy.load import empty_model
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.quantize import QTensor, quantize
from qurl_ray.quant.units import units
from qurl_ray.types import PolicySpec
from qurl_ray.weights.receiver import decode_buckets
from qurl_ray.weights.stream import Publisher, assemble_manifest

SHAPE = LlamaConfig(
    hidden_size=1024,
    num_hidden_layers=14,
    num_attention_heads=16,
    num_key_value_heads=16,
    intermediate_size=2816,
    vocab_size=32000,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)
CHANGED = 0.01
ARMS = ("full precision", "INT8, whole", "INT8, delta")
ASKED = {"INT8, whole": 2.5, "INT8, delta": 0.5}
"""Seconds that are to be reached at most."""


def moved(q: QTensor, generator: torch.Generator) -> QTensor:
    """Return codes of which some have changed by one."""
    at = torch.rand(q.codes.shape, generator=generator) < CHANGED
    step = torch.where(q.codes > 0, -1, 1).to(q.codes.dtype)
    return QTensor(codes=torch.where(at, q.codes + step, q.codes), scale=q.scale, fmt=q.fmt)


def main(
    rounds: Annotated[int, typer.Option(help="Loads of each kind, which take turns.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of vLLM's worker.")] = 2,
    out: Annotated[Path, typer.Option(help="The JSON file; the table goes beside it.")] = RESULTS / "vllm_sync.json",
) -> None:
    """Measure seconds until a vLLM engine holds and has verified a version."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from qurl_ray.engines.vllm.engine import VllmEngine

    folder = tempfile.mkdtemp(prefix="qurl-shape-")
    SHAPE.save_pretrained(folder)
    spec = PolicySpec(source=folder, max_length=512)
    torch.manual_seed(0)
    model = empty_model(spec).requires_grad_(False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    names = units(model, QuantizationConfig().keep)
    engine = VllmEngine(spec, slots=2, threads=threads, timeout_s=300)
    fmt = get_format("int8", engine.weight_max_code("int8"))
    codes = {name: quantize(p, fmt) for name, p in model.named_parameters() if name in names}
    generator = torch.Generator().manual_seed(0)
    publishers = {arm: Publisher(names) for arm in ("none", "int8")}
    took: dict[str, list[float]] = {arm: [] for arm in ARMS}
    messages: dict[str, Counter[str]] = {}
    start = engine._server.start
    version = 0
    for number in range(rounds + 1):
        for arm in ARMS:
            version += 1
            base = version - 1 if arm == "INT8, delta" else None
            if base:
                codes = {name: moved(q, generator) for name, q in codes.items()}
            own = None if arm == "full precision" else fmt
            sent: dict[str, Any] = dict(model.named_parameters()) | (codes if own else {})
            publisher = publishers[own.name if own else "none"]
            buckets = list(
                publisher.prepare(sent.items(), own, version=version, base_version=base, unquantized="bfloat16")
            )
            manifest = assemble_manifest(version, own, [bucket.records for bucket in buckets])
            assert manifest.base_version == base
            methods: list[str] = []
            engine._server.start = lambda method, *args, m=methods: m.append(method) or start(method, *args)  # type: ignore[method-assign]
            began = time.perf_counter()
            engine.load(manifest, decode_buckets((b.payloads for b in buckets), manifest, engine.resident))
            if number:  # the first round packs for the first time, and reads back what the delta is added to
                took[arm].append(time.perf_counter() - began)
            messages[arm] = Counter(methods)
            print(
                f"{arm}: {time.perf_counter() - began:.2f} s, {sum(b.bytes for b in buckets) / 1e6:.0f} MB", flush=True
            )
    engine.close()
    figures = {
        "parameters": parameters,
        "seconds": took,
        "messages": messages,
        "machine": machine(),
        "threads": threads,
    }
    out.write_text(json.dumps(figures, indent=2) + "\n")
    lines = [
        "# Loading a version into vLLM",
        "",
        f"`python benchmarks/vllm_sync.py`, {parameters / 1e6:.0f} million parameters, {machine()}, {threads} threads",
        "",
        "| version | s, median | range | asked | messages to the worker |",
        "|---|---|---|---|---|",
    ]
    for arm, seconds in took.items():
        sent_to = ", ".join(f"{count} × {method}" for method, count in messages[arm].items())
        span = f"{min(seconds):.2f} to {max(seconds):.2f}"
        lines.append(f"| {arm} | {statistics.median(seconds):.2f} | {span} | {ASKED.get(arm, '')} | {sent_to} |")
    print("\n".join(lines))
    out.with_suffix(".md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    typer.run(main)
