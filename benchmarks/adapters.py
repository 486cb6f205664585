"""LoRA over codes against training of all parameters: python benchmarks/adapters.py (an hour on 2 cores).

Four parts, each a set of runs that are kept (a second call makes only missing ones):

    speed     SmolLM2, INT8, pairs of runs one after the other, the same number of samples in each step
    exact     SmolLM2, 20 steps of adapters: the largest gap, KL and bytes of all syncs
    bytes     SmolLM2, 4 steps with deltas, as between nodes: adapters over codes (float32) and over full precision
              (bfloat16), over a whole INT8 sync of all parameters
    learning  the quickstart's sums, 60 steps, three seeds of each arm

and `memory`: bytes of weights, gradients and moments of SmolLM2's learner after an update, counted in this process. A
table and the figures go to benchmarks/results/adapters.{md,json}. `make smollm2` installs the weights.
"""

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from cells import Arm, Cell, cell
from shared import RESULTS, ROOT, Figures

from qurl_ray.config import load_config
from qurl_ray.learner.flow import Adaptation, FrozenCodes, UnifiedFlow
from qurl_ray.learner.learner import make_learner
from qurl_ray.policy.adapters import add_adapters
from qurl_ray.policy.gguf import cached_gguf_policy
from qurl_ray.policy.load import load_model
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.linear import weight_max_code
from qurl_ray.quant.units import units
from qurl_ray.training.rank.objectives import objective_settings
from qurl_ray.types import Adapters, PolicySpec

SMOLLM2, SUMS = "qurl_ray/configs/smollm2_135m.yaml", "qurl_ray/configs/quickstart.yaml"
RANK = 16
ADAPTERS = (f"learner.lora.rank={RANK}", "quantization.uaq_scale=1", "algorithm.correction=ignore")
SAME = ("algorithm.dynamic_sampling=false", "evaluation.problems=16", "checkpoint.every=0")
"""Settings with which each step of both arms has the same number of samples, and little else is done."""
LORA = Arm(name="LoRA over INT8 codes", settings=(*ADAPTERS, "learner.lr=1e-4"), color="#D55E00")
FULL = Arm(name="all parameters, INT8", settings=(), color="#0072B2")
LORA_SUMS = Arm(name=LORA.name, settings=(*ADAPTERS, "learner.lr=1e-3"), color=LORA.color)


def state_bytes(adapters: Adapters | None, *, codes: bool) -> int:
    """Bytes of weights, gradients and moments of SmolLM2's learner after one update."""
    config = load_config(ROOT / SMOLLM2, [])
    spec = PolicySpec(source=str(cached_gguf_policy(config.model.path)), max_length=64)  # type: ignore[union-attr]
    model = load_model(spec)
    quantized, frozen = units(model, config.quantization.keep), None
    if adapters:
        add_adapters(model, adapters)
    if codes:
        fmt = get_format("int8", weight_max_code(get_format("int8"), torch.device("cpu")))
        flow = UnifiedFlow(fmt=fmt, quantized=quantized, backward="straight_through")
        frozen = FrozenCodes(model, flow, {}, "cpu")
    learner = make_learner(
        model,
        config.learner,
        objective_settings(config),
        temperature=1.0,
        total_updates=1,
        adaptation=Adaptation(adapters=adapters, base="", frozen=frozen) if adapters else None,
    )
    backend: Any = learner._policy
    trained = [parameter for parameter in backend.module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    gradients = sum(parameter.nbytes for parameter in trained)
    backend.step(1e-6)
    moments = sum(
        value.nbytes
        for optimizer in backend._optimizers
        for state in optimizer.state.values()
        for value in state.values()
    )
    weights = sum(parameter.nbytes for parameter in backend.module.parameters())
    coded = sum(part.nbytes for _, q in frozen.named_codes() for part in q.parts) if frozen else 0
    return weights + coded + gradients + moments


def step_seconds(one: Cell) -> float:
    """Median seconds of the steps but the first, in which caches are cold."""
    return statistics.median(one.series("time/step")[1:])


def main(
    pairs: Annotated[int, typer.Option(help="Pairs of runs of the part speed; 0 leaves it out.")] = 3,
    seeds: Annotated[int, typer.Option(help="Seeds of the part learning; 0 leaves it out.")] = 3,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = ROOT / "runs" / "adapters",
    out: Annotated[Path, typer.Option(help="The JSON file; the table goes beside it.")] = RESULTS / "adapters.json",
) -> None:
    """Make the runs, and write their figures after every one."""
    runs = runs.resolve()
    figures = Figures(out)
    keep = figures.keep
    full = state_bytes(None, codes=False)
    shape = Adapters(rank=RANK, alpha=32.0, targets=("all_linear",))
    keep("states over full training", {c: state_bytes(shape, codes=c == "codes") / full for c in ("codes", "full")})
    ratios, syncs = [], []
    for pair in range(pairs):
        common = ("steps=5", *SAME)
        lora, other = (cell("speed", SMOLLM2, common, arm, pair, runs, quiet=True) for arm in (LORA, FULL))
        assert lora
        assert other
        ratios.append(step_seconds(other) / step_seconds(lora))
        syncs.append(lora.last("sync/bytes") / other.last("sync/bytes"))
        keep("steps/s over full training", {"pairs": ratios, "median": statistics.median(ratios)})
        keep("bytes of a sync over full training's", syncs[-1])
    if pairs:
        exact = cell("exact", SMOLLM2, ("steps=20", *SAME, "sync.probe_every=1"), LORA, 0, runs, quiet=True)
        assert exact
        largest = {key: max(exact.series(key)) for key in ("sync/probe_gap_max", "mismatch/kl", "sync/bytes")}
        keep("20 steps, the largest", largest | {"steps": len(exact.steps)})
    if pairs:
        whole = cell("speed", SMOLLM2, ("steps=5", *SAME), FULL, 0, runs, quiet=True)
        assert whole
        for form, base in (("float32", "codes"), ("bfloat16", "full")):
            common = ("steps=4", *SAME, "sync.delta=true", f"learner.lora.base={base}")
            sent = cell(f"bytes-{base}", SMOLLM2, common, LORA, 0, runs, quiet=True)
            assert sent
            keep(f"bytes of a delta, {form}, over a whole sync", sent.last("sync/bytes") / whole.last("sync/bytes"))
    for name, arm in (("adapters", LORA_SUMS), ("all parameters", FULL)):
        cells = [cell("learning", SUMS, ("steps=60",), arm, seed, runs, quiet=True) for seed in range(seeds)]
        if cells:
            keep(f"solved after 60 steps, {name}", [one.summary["accuracy_after_quantized"] for one in cells if one])
    lines = [f"# Adapters\n\n`python benchmarks/adapters.py`; {figures.values['machine']}\n", "| | |\n|---|---|"]
    lines += [f"| {name} | {json.dumps(value)} |" for name, value in figures.values.items() if name != "machine"]
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
