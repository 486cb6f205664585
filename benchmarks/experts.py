"""A mixture of experts on the quickstart's sums, with and without router replay: python benchmarks/experts.py (hours).

Eight experts in each layer, two for each token. A decode, two sets of runs that are kept, so that a second call
makes only missing ones, and costs:

    decode    a random shape of 1.0 B parameters, 0.26 B of them active: INT8 over float32, 1 to 8 rows
    mismatch  INT8 rollouts without and with replay, and INT8 in a unified flow, at a rate that moves nothing: KL(b‖p),
              effective sample size and share of routes that differ
    learning  the first three at the quickstart's rate: what is solved after the run
    costs     seconds of a step of the learner with replayed routes over those without, in pairs; bytes and seconds of a
              sync of the random shape in which some of the experts changed

The figures go to benchmarks/results/experts.json after every one of them.
"""

import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from cells import Arm, Cell, cell, mean_of_numbers
from shared import RESULTS, ROOT, Figures
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.learner.batching import plan
from qurl_ray.learner.learner import make_learner
from qurl_ray.policy.attention import NAME
from qurl_ray.policy.experts import mixtures, with_experts
from qurl_ray.policy.load import load_model, with_row_rules
from qurl_ray.policy.save import save_policy
from qurl_ray.policy.tiny import make_tokenizer
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.units import units
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.types import PolicySpec, Request, SamplingParams, Trajectory
from qurl_ray.weights.local import load_into, send_into
from qurl_ray.weights.stream import Publisher

SUMS = "qurl_ray/configs/quickstart.yaml"
MIXTURE = ("model.experts=8", "model.intermediate_size=128")
UNIFIED = ("precision_flow=unified", "quantization.uaq_scale=1", "algorithm.correction=ignore")
ARMS = (
    Arm(name="INT8", settings=(), color="#0072B2"),
    Arm(name="INT8, replay", settings=("rollout.router_replay=rollout",), color="#009E73"),
    Arm(name="INT8 unified", settings=UNIFIED, color="#D55E00"),
)
WITH_WEIGHTS = Arm(
    name="INT8, replay with weights",
    settings=("rollout.router_replay=rollout", "rollout.router_replay_weights=true"),
    color="#CC79A7",
)
MISMATCH = ("mismatch/kl", "mismatch/ess", "mismatch/routes_differing")


def random_mixture(folder: Path) -> PolicySpec:
    """A policy of 1.0 B parameters with random weights, 0.26 B of which compute each token; made once."""
    if folder.is_dir():
        return PolicySpec(source=str(folder))
    config = Qwen3MoeConfig(
        vocab_size=18,
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        moe_intermediate_size=768,
        num_experts=32,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = with_experts(Qwen3MoeForCausalLM._from_config(config, attn_implementation=NAME))
    for parameter in model.base_model.layers.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=0.02)
    save_policy(with_row_rules(model), make_tokenizer(), folder)
    return PolicySpec(source=str(folder))


def decode_rates(folder: Path, rows: tuple[int, ...] = (1, 2, 4, 8), rounds: int = 5) -> dict[str, list[float]]:
    """Tokens per second of INT8 over those of float32, by rows; one ratio for each pair of measurements."""
    spec = random_mixture(folder)
    model, engines = load_model(spec), {}
    for name in ("none", "int8"):
        engine = TorchEngine(spec, slots=max(rows))
        fmt = get_format(name, engine.weight_max_code(name)) if name != "none" else None
        load_into(engine, model.named_parameters(), fmt, quantized=units(model, [r"lm_head\."]) if fmt else {})
        engines[name] = engine
    sampling = SamplingParams(max_new_tokens=33, ignore_eos=True)
    prompt = np.full(4, 5, dtype=np.int32)

    def seconds(engine: TorchEngine, count: int) -> float:
        requests = [Request(uid=str(i), prompt_ids=prompt, seed=i, sampling=sampling) for i in range(count)]
        started = time.perf_counter()
        engine.generate(requests, version=1)
        return time.perf_counter() - started

    ratios: dict[str, list[float]] = {str(count): [] for count in rows}
    for _ in range(5):  # after so many steps of a few rows, weights and codes have been packed
        for engine in engines.values():
            seconds(engine, max(rows))
    for round_ in range(rounds + 1):
        for count in rows:
            took = {name: seconds(engine, count) for name, engine in engines.items()}
            if round_:  # the first fills caches
                ratios[str(count)].append(took["none"] / took["int8"])
    return ratios


def replay_cost(folder: Path, pairs: int = 9) -> list[float]:
    """Seconds of a learner's step with replayed routes over those without, of the random shape; a ratio per pair."""
    spec = random_mixture(folder)
    learner = make_learner(
        load_model(spec),
        LearnerConfig(lr=1e-9, backend="torch"),
        ObjectiveSettings(clip_low=0.2, clip_high=0.28),
        temperature=1.0,
        total_updates=100,
    )
    rng = np.random.default_rng(0)
    samples = []
    for index in range(8):
        ids = rng.integers(3, 18, size=64).astype(np.int32)
        routes = np.stack([rng.permutation(32)[:8] for _ in range(63 * 12)]).reshape(63, 12, 8).astype(np.uint8)
        answer = {"token_ids": ids[16:], "logprobs": np.full(48, -2.0, np.float32), "versions": np.zeros(48, np.int32)}
        samples.append(
            Trajectory(uid=str(index), prompt_ids=ids[:16], reward=1.0, advantage=1.0, routes=routes, **answer)
        )

    def seconds(replayed: bool) -> float:
        chosen = [[sample if replayed else replace(sample, routes=None)] for sample in samples]
        share = plan(chosen, updates=1, ranks=1, token_budget=1024, seed=0)[0]
        started = time.perf_counter()
        learner.learn(share)
        return time.perf_counter() - started

    seconds(True)
    return [seconds(True) / seconds(False) for _ in range(pairs)]


def delta_costs(folder: Path) -> dict[str, dict[str, float]]:
    """Bytes and seconds of an INT8 sync to the torch engine, by the share of experts that changed."""
    spec = random_mixture(folder)
    model, engine = load_model(spec), TorchEngine(spec, slots=1)
    publisher, fmt = Publisher(units(model, [r"lm_head\."])), get_format("int8", engine.weight_max_code("int8"))
    experts = [mixture.experts for mixture in mixtures(model)]
    send_into(publisher, engine, model.named_parameters(), fmt, version=1)
    costs: dict[str, dict[str, float]] = {}
    for version, share in enumerate((0.0, 0.1, 0.25, 0.5, 1.0), start=2):
        with torch.no_grad():
            for of_layer in experts:
                for expert in list(of_layer)[: round(share * len(of_layer))]:
                    expert.up_proj.weight.view(-1)[::100].neg_()  # one code of a hundred
        started = time.perf_counter()
        manifest = send_into(
            publisher, engine, model.named_parameters(), fmt, version=version, base_version=version - 1
        )
        seconds = time.perf_counter() - started
        costs[f"{share:.0%}"] = {"bytes": sum(r.bytes for r in manifest.tensors), "seconds": round(seconds, 2)}
    return costs


def mismatch_of(run: Cell) -> dict[str, float]:
    """Means over the steps of a run, of those metrics that it has."""
    means = {key.split("/")[1]: mean_of_numbers(run.series(key)) for key in MISMATCH}
    return {key: mean for key, mean in means.items() if not math.isnan(mean)}


def main(
    seeds: Annotated[int, typer.Option(help="Seeds of each arm of the part mismatch.")] = 5,
    learned: Annotated[int, typer.Option(help="Seeds of each arm of the part learning.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of the part learning.")] = 120,
    decode: Annotated[bool, typer.Option(help="Make the part decode.")] = True,
    costs: Annotated[bool, typer.Option(help="Make the part costs.")] = True,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = ROOT / "runs" / "experts",
    out: Annotated[Path, typer.Option(help="The JSON file.")] = RESULTS / "experts.json",
) -> None:
    """Make the runs, and write their figures after every one."""
    runs = runs.resolve()
    figures = Figures(out)
    keep = figures.keep
    still = ("steps=3", "learner.lr=1e-9", "evaluation.problems=1")
    for seed in range(seeds):
        for arm in (*ARMS, WITH_WEIGHTS):
            common = (*MIXTURE, f"model.seed={seed}", *still)
            run = cell("mismatch", SUMS, common, arm, seed, runs, quiet=True)
            assert run
            figures.add(f"mismatch, {arm.name}", mismatch_of(run), seed)
    for seed in range(learned):
        for arm in ARMS:
            common = (*MIXTURE, f"model.seed={seed}", f"steps={steps}")
            run = cell("learning", SUMS, common, arm, seed, runs, quiet=True)
            assert run
            solved = run.summary["accuracy_after_quantized"]
            figures.add(f"solved after {steps} steps, {arm.name}", solved, seed)
            figures.add(f"mismatch while learning, {arm.name}", mismatch_of(run), seed)
    if costs:
        runs.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        pairs = replay_cost(runs / "random")
        keep("step with replay over one without, pairs", pairs)
        keep("step with replay over one without, median", statistics.median(pairs))
        keep("sync by share of experts that changed", delta_costs(runs / "random"))
    if decode:  # at last: its memory is not given back
        torch.manual_seed(0)
        runs.mkdir(parents=True, exist_ok=True)
        ratios = decode_rates(runs / "random")
        keep("INT8 decode over float32, ratios by rows", ratios)
        keep("INT8 decode over float32, medians", {rows: statistics.median(each) for rows, each in ratios.items()})


if __name__ == "__main__":
    typer.run(main)
