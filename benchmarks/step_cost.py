"""Cost of the objective and its diagnostics in a training step: python benchmarks/step_cost.py (about 5 minutes).

Measures one update of a model of SmolLM2-135M's shape on 4096 tokens: eight answers of 448 tokens after prompts of 64.
Shares are of the step's time in the same process, medians of several repeats. The head is measured by itself, in a
process of its own: the memory that log-probs and entropies of all tokens need, forward and backward. Results are in
benchmarks/results/step_cost.json.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from memory import WITHOUT_BOUND, _peak_from_now
from shared import machine
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.batching import MiniBatch, plan
from qurl_ray.learner.learner import make_learner
from qurl_ray.learner.scorer import Scores
from qurl_ray.policy import attention, logprobs
from qurl_ray.rl.corrections import CorrectionSettings
from qurl_ray.rl.objective import ObjectiveSettings, objective
from qurl_ray.rl.reduce import as_floats
from qurl_ray.rl.value import gae
from qurl_ray.types import Trajectory

PROMPT, ANSWER, ANSWERS = 64, 448, 8
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
QURL = ObjectiveSettings(
    correction=CorrectionSettings(weight="token", cap=2.0, adaptive_clip=True, veto=1e-4, reject="k3", reject_high=1.0),
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=10.0,
)


def model(layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(**SMOLLM2, num_hidden_layers=layers, attn_implementation=attention.NAME)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def samples() -> MiniBatch:
    rng = np.random.default_rng(0)
    ids = lambda count: rng.integers(SMOLLM2["vocab_size"], size=count).astype(np.int32)  # noqa: E731
    group = [
        Trajectory(
            uid=f"0/{g}",
            prompt_ids=ids(PROMPT),
            token_ids=ids(ANSWER),
            logprobs=rng.normal(-11, 0.3, size=ANSWER).astype(np.float32),
            reward=float(g % 2),
            advantage=float(g % 2 * 2 - 1),
            versions=np.zeros(ANSWER, dtype=np.int32),
        )
        for g in range(ANSWERS)
    ]
    return plan([group], updates=1, ranks=1, token_budget=ANSWERS * (PROMPT + ANSWER), seed=0)[0][0]


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def shares(layers: int, repeats: int) -> dict[str, float]:
    """Measure the seconds of a whole step, and those that objective, diagnostics and entropy add to it."""
    policy = model(layers)
    learner = make_learner(policy, LearnerConfig(lr=1e-6), QURL, temperature=1.0, total_updates=100)
    mini_batch = samples()
    step = median_seconds(lambda: learner.learn([mini_batch]), repeats)
    one = learner._make_pass(mini_batch.micro_batches[0])
    mask_BT = one.batch.mask_BT
    with torch.no_grad():
        found_BT = Scores(*learner._policy(one.batch)).logprobs_BT

    def loss_and_diagnostics() -> None:
        leaf_BT = found_BT.clone().requires_grad_()
        loss, sums = objective(
            leaf_BT,
            found_BT,
            one.batch.behavior_BT,
            one.advantages,
            mask_BT,
            mini_batch.denominators,
            QURL,
            reference_BT=found_BT,
            entropy_BT=found_BT,
        )
        loss.backward()
        as_floats(sums)

    states_Nd = torch.randn(ANSWERS * ANSWER, SMOLLM2["hidden_size"])
    ids_N = one.batch.token_ids_BT[mask_BT]

    def head(entropy: str) -> float:
        with torch.no_grad():
            return median_seconds(
                lambda: logprobs.score_states(policy, states_Nd, ids_N, 1.0, entropy=entropy), max(3, repeats)
            )

    rewards_BT, values_BT = one.batch.rewards_BT, torch.rand(mask_BT.shape)
    return {
        "step": step,
        "objective and diagnostics": median_seconds(loss_and_diagnostics, 20),
        "entropy": head("value") - head("none"),
        "advantages per token (PPO)": median_seconds(
            lambda: gae(rewards_BT, values_BT, mask_BT, gamma=1.0, lam=0.95), 20
        ),
    }


def head_peak(in_pieces: bool) -> int:
    """Measure the peak memory of log-probs and entropies of all answers' tokens, forward and backward, in bytes."""
    if not in_pieces:
        logprobs.HEAD_BYTES = WITHOUT_BOUND
    logprobs.KEPT_BYTES = 0
    policy = model(layers=1)
    states_Nd = torch.randn(ANSWERS * ANSWER, SMOLLM2["hidden_size"], requires_grad=True)
    states_Nd.grad = torch.zeros_like(states_Nd)
    policy.get_output_embeddings().weight.grad = torch.zeros_like(policy.get_output_embeddings().weight)
    ids_N = torch.randint(SMOLLM2["vocab_size"], (len(states_Nd),))
    peak = _peak_from_now("cpu")
    found_N, _ = logprobs.score_states(policy, states_Nd, ids_N, 1.0, entropy="value")
    found_N.sum().backward()
    return peak()


def in_own_process(in_pieces: bool) -> int:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed tensors are returned to the system at once
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(head_peak, in_pieces).result()


def main(
    layers: Annotated[int, typer.Option(help="Number of decoder layers; SmolLM2-135M has 30.")] = 30,
    repeats: Annotated[int, typer.Option(help="Number of times that the step is measured.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Print the cost of each part in a step, and the head's memory."""
    print(f"{machine()}; {torch.get_num_threads()} threads", flush=True)
    seconds = shares(layers, repeats)
    print("\n| | ms | of the step |\n|---|---|---|")
    for name, value in seconds.items():
        print(f"| {name} | {1000 * value:,.1f} | {value / seconds['step']:.2%} |", flush=True)
    logits = ANSWERS * ANSWER * SMOLLM2["vocab_size"] * 4
    peaks = {"in pieces": in_own_process(True), "at once": in_own_process(False)}
    print("\n| log-probs and entropies of 3584 tokens | peak MiB |\n|---|---|")
    print(f"| float32 logits of all tokens, by themselves | {logits / 2**20:,.0f} |")
    for name, value in peaks.items():
        print(f"| {name} | {value / 2**20:,.0f} |")
    if out:
        figures = {"machine": machine(), "layers": layers, "seconds": seconds, "logits_bytes": logits, "peaks": peaks}
        out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
