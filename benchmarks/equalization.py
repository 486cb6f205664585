"""Are codes truer with equalization? python benchmarks/equalization.py (40 minutes), --only a table, or --quick (5).

The first table is SmolLM2-135M-Instruct on answers that it draws itself, at temperature 1, to the problems of its
settings file, smollm2_135m: for each format, KL(b‖p) over the vocabulary, ESS and the share of tokens whose ratio
p/b leaves the clip range. Rows are without equalization, with factors from random tokens, as in the first step of a
run, and with factors from other answers, as in the steps after it. The second table is the error of its weights over
their norm, and the parts of its square (quantizers.py). The third table is the quickstart from three cold
starts, 120 steps with INT8 rollouts. `make smollm2` installs the weights. Writes
benchmarks/results/equalization.{json,md}.
"""

import copy
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import engines
import torch
import typer
from cells import Arm, Cell, cell
from quantizers import squared_error
from shared import RESULTS, ROOT, machine
from transformers import PreTrainedModel

from qurl_ray.config.load import load_config
from qurl_ray.data.prompts import encode_prompt
from qurl_ray.data.tasks import load_task
from qurl_ray.policy.load import load_tokenizer
from qurl_ray.policy.logprobs import log_softmax
from qurl_ray.policy.ranges import factors_from, measured_factors, measuring
from qurl_ray.quant.equalize import Factors, equalized, equalized_sites
from qurl_ray.quant.formats import Format, get_format
from qurl_ray.quant.linear import QuantizedLinear, weight_max_code
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.units import units
from qurl_ray.types import Request, SamplingParams

Part = Literal["truth", "errors", "learning"]
CONFIG = ROOT / "qurl_ray" / "configs" / "smollm2_135m.yaml"
FORMATS = ("int8", "fp8", "fp8_block", "int4", "nvfp4", "nvfp4_w4a4", "mxfp4", "mxfp8")
CLIP = (0.8, 1.28)
ARMS = (
    Arm(name="off", settings=("quantization.equalize=false",), color="#777777"),
    Arm(name="on", settings=("quantization.equalize=true",), color="#0072B2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A prompt with an answer that the model drew in full precision."""

    ids: torch.Tensor
    prompt: int
    """Number of the ids [1, T] that are the prompt's."""


def answers(model: PreTrainedModel, spec: Any, count: int, new_tokens: int) -> tuple[list[Answer], list[Answer]]:
    """Return answers to measure on, and half as many others, which factors are computed from."""
    config, tokenizer = load_config(CONFIG, []), load_tokenizer(spec)
    task = load_task(config.task, eval_problems=1)
    encode = partial(encode_prompt, tokenizer=tokenizer, task=config.task)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=new_tokens)
    asked = [
        Request(uid=problem.uid, prompt_ids=encode(problem), sampling=sampling, seed=seed)
        for seed, problem in enumerate(task.train[: count + count // 2])
    ]
    drawn = engines.engine(spec, model, "none", slots=32).generate(asked, version=1)
    found = [
        Answer(ids=torch.tensor([[*request.prompt_ids, *one.token_ids]]), prompt=len(request.prompt_ids))
        for request, one in zip(asked, drawn, strict=True)
    ]
    return found[:count], found[count:]


@torch.inference_mode()
def factors_on(model: PreTrainedModel, names: set[str], seen: Sequence[Answer]) -> Mapping[str, Factors]:
    """Return the factors that a learner computes from these answers."""
    sites, maxima = equalized_sites(model, names), {}
    with measuring(model, sites, maxima):
        for one in seen:
            model.base_model(one.ids, use_cache=False)
    return factors_from(sites, maxima, model.named_parameters())


@torch.inference_mode()
def logprobs(model: PreTrainedModel, measured: Sequence[Answer]) -> list[torch.Tensor]:
    """Return log-probs [answer, vocabulary] of each answer's tokens."""
    return [log_softmax(model(one.ids).logits[0, one.prompt - 1 : -1], 1.0) for one in measured]


def with_codes(model: PreTrainedModel, names: set[str], fmt: Format, factors: Mapping[str, Factors]) -> PreTrainedModel:
    made = copy.deepcopy(model)
    for name, parameter in equalized(model.named_parameters(), factors):
        path, _, leaf = name.rpartition(".")
        if name in names:
            linear = made.get_submodule(path)
            made.set_submodule(path, QuantizedLinear(quantize(parameter, fmt), linear.bias))
        else:
            getattr(made.get_submodule(path), leaf).data = parameter.detach().clone()
    return made


def figures(full: Sequence[torch.Tensor], coded: Sequence[torch.Tensor], measured: Sequence[Answer]) -> dict:
    """Return KL(b‖p), exact over the vocabulary, and ESS and clip shares of the tokens that were drawn."""
    ids = [one.ids[0, one.prompt :, None] for one in measured]
    kls = torch.cat([(b.exp() * (b - p)).sum(dim=-1) for b, p in zip(coded, full, strict=True)])
    rho = torch.cat([(p - b).gather(1, i)[:, 0].exp() for b, p, i in zip(coded, full, ids, strict=True)])
    return {
        "kl": float(kls.mean()),
        "error": float(kls.std() / len(kls) ** 0.5),
        "ess": float(rho.sum() ** 2 / (len(rho) * rho.square().sum())),
        "below": float((rho < CLIP[0]).float().mean()),
        "above": float((rho > CLIP[1]).float().mean()),
        "tokens": len(rho),
    }


def formats(model: PreTrainedModel) -> Iterator[Format]:
    """Yield the formats as they are used here. A group of int4 has 64 columns, as SmolLM2's widths need."""
    for name in FORMATS:
        fmt = get_format(name, weight_max_code(get_format(name), model.device))
        yield replace(fmt, group=64) if name == "int4" else fmt


def truth(count: int, new_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the first table."""
    spec, model = engines.smollm2()
    names = units(model, load_config(CONFIG, []).quantization.keep)
    measured, seen = answers(model, spec, count, new_tokens)
    full = logprobs(model, measured)
    ways = {"off": {}, "random tokens": measured_factors(model, names), "own answers": factors_on(model, names, seen)}
    for fmt in formats(model):
        for way, factors in ways.items():
            coded = logprobs(with_codes(model, names, fmt, factors), measured)
            yield {"format": fmt.name, "factors": way} | figures(full, coded, measured)


def truth_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| format | factors from | KL(b‖p) | of off | ESS | p/b below 0.8 % | above 1.28 % |", "|" + "---|" * 7]
    off = {row["format"]: row["kl"] for row in rows if row["factors"] == "off"}
    return lines + [
        f"| {r['format']} | {r['factors']} | {r['kl']:.4f} ± {r['error']:.4f} | {r['kl'] / off[r['format']]:.2f} | "
        f"{r['ess']:.4f} | {100 * r['below']:.1f} | {100 * r['above']:.1f} |"
        for r in rows
    ]


def errors() -> Iterator[dict[str, Any]]:
    """Yield for each format with rounded steps the squared error of all linears of SmolLM2, over their squares, and its
    parts."""
    _, model = engines.smollm2()
    names = units(model, load_config(CONFIG, []).quantization.keep)
    weights = [parameter for name, parameter in model.named_parameters() if name in names]
    whole = sum(float(w.square().sum()) for w in weights)
    for name in ("nvfp4", "mxfp4", "mxfp8"):
        found = [asdict(squared_error(w, get_format(name))) for w in weights]
        yield {"format": name} | {part: sum(one[part] for one in found) / whole for part in found[0]}


def errors_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| format | error % | of its square: scale bias % | dead zone % | grid noise % |", "|" + "---|" * 5]
    for row in rows:
        name, *parts = row.values()
        total = sum(parts)
        shares = " | ".join(f"{100 * part / total:.1f}" for part in parts)
        lines.append(f"| {name} | {100 * total**0.5:.2f} | {shares} |")
    return lines


def learning_table(found: dict[str, list[Cell]]) -> list[str]:
    lines = [
        "| equalization | after %, per cold start | mean | INT8's % | KL(b‖p), median | ESS, least | clipped % |",
        "|" + "---|" * 7,
    ]
    for name, runs in found.items():
        after, coded = (
            [100 * one.summary[key] for one in runs] for key in ("accuracy_after", "accuracy_after_quantized")
        )
        kl, ess, clipped = ([v for one in runs for v in one.series(key) if v == v] for key in COLUMNS)
        lines.append(
            f"| {name} | {', '.join(f'{a:.1f}' for a in after)} | {statistics.mean(after):.1f} | "
            f"{statistics.mean(coded):.1f} | {statistics.median(kl):.5f} | {min(ess):.3f} | "
            f"{100 * statistics.mean(clipped):.2f} |"
        )
    return lines


COLUMNS = ("mismatch/kl", "mismatch/ess", "clip/upper")


def learning(starts: int, runs: Path) -> dict[str, list[Cell]]:
    """Run the quickstart from several cold starts, without equalization and with it."""
    found: dict[str, list[Cell]] = {}
    for start in range(starts):
        for arm in ARMS:
            common = (f"model.seed={start}", "steps=120", "rollout.threads=1", "learner.threads=1")
            done = cell("equalization", "qurl_ray/configs/quickstart.yaml", common, arm, 0, runs.resolve(), quiet=True)
            found.setdefault(arm.name, []).append(done)
    return found


def main(
    only: Annotated[Part | None, typer.Option(help="A table, beside what FILE has of the other.")] = None,
    quick: Annotated[bool, typer.Option(help="The first two tables, on a quarter of the answers.")] = False,
    starts: Annotated[int, typer.Option(help="Cold starts of the second table.")] = 3,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = ROOT / "runs" / "equalization",
    out: Annotated[Path, typer.Option(help="The JSON file; the tables go beside it.")] = RESULTS / "equalization.json",
) -> None:
    """Measure how true codes are with equalization and without, and what a policy learns with each."""
    figures = json.loads(out.read_text()) if only and out.exists() else {"tables": {}, "machines": {}}
    for part in [only] if only else ["truth", "errors"] if quick else list(get_args(Part)):
        if part == "truth":
            rows = list(truth(16 if quick else 64, 32))
            figures["truth"], figures["tables"][part] = rows, truth_table(rows)
        elif part == "errors":
            rows = list(errors())
            figures["errors"], figures["tables"][part] = rows, errors_table(rows)
        else:
            found = learning(starts, runs)
            figures["learning"] = {name: [one.summary for one in done] for name, done in found.items()}
            figures["tables"][part] = learning_table(found)
        figures["machines"][part] = machine()
        out.write_text(json.dumps(figures, indent=2) + "\n")  # keeps the measured table if the next one fails
    lines = ["# Equalization", "", f"`python benchmarks/equalization.py{' --quick' * quick}`"]
    lines += [f"- {part}: {where}" for part, where in figures["machines"].items()]
    lines += [line for table in figures["tables"].values() for line in ("", *table)]
    print("\n".join(lines))
    out.with_suffix(".md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    typer.run(main)
