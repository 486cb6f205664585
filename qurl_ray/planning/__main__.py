"""Command line: python -m qurl_ray.planning --model Qwen/Qwen2.5-7B --gpu h100 --gpus 8 --response-length 8192"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from qurl_ray.config import RunConfig
from qurl_ray.config.cli import errors_told
from qurl_ray.config.load import load_config
from qurl_ray.errors import ConfigError
from qurl_ray.planning.configured import check_layout
from qurl_ray.planning.machines import GPUS, find_gpu
from qurl_ray.planning.plan import make_plan
from qurl_ray.planning.shapes import SHAPES, Shape, configured_shape, find_shape
from qurl_ray.planning.show import as_values, show, show_machine, show_published
from qurl_ray.planning.workload import Workload, configured_workload, gpus_of

_WIDTH = 110
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=f"Models known by name: {', '.join(SHAPES)}.\n\nDocumentation: docs/choosing.md")
def main(
    model: Annotated[str | None, typer.Option(help="Name (see below), or a folder with a config.json.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A run's YAML file, or one of `qurl configs`: model, lengths, batch and GPUs are its own."),
    ] = None,
    gpu: Annotated[str, typer.Option(help=f"Kind of GPU: {', '.join(GPUS)}.")] = "h100",
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs; those of --config, or 8, if absent.")] = None,
    prompts: Annotated[
        int | None, typer.Option(help="Number of prompts of a step that are learned from.  [128]")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Answers to each prompt.  [8]")] = None,
    prompt_length: Annotated[int | None, typer.Option(help="Tokens, on average.  [256]")] = None,
    response_length: Annotated[int | None, typer.Option(help="Limit of an answer, in tokens.  [8192]")] = None,
    mean_length: Annotated[
        float | None, typer.Option(help="Mean length of answers, in tokens.  [a quarter of the limit]")
    ] = None,
    updates: Annotated[int | None, typer.Option(help="Number of updates per step.  [4]")] = None,
    kept: Annotated[float | None, typer.Option(help="Share of groups that dynamic sampling keeps.  [1]")] = None,
    slots: Annotated[int | None, typer.Option(help="Sequences that an engine decodes at a time.  [512]")] = None,
    micro_tokens: Annotated[int | None, typer.Option(help="Tokens of one learner's pass.  [8192]")] = None,
    staleness: Annotated[int | None, typer.Option(help="Steps that rollouts may run ahead.  [0]")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="GPUs of an engine; the best if absent.")] = None,
    reference: Annotated[bool | None, typer.Option("--reference", help="With a KL penalty.")] = None,
    critic: Annotated[bool | None, typer.Option("--critic", help="With a value model.")] = None,
    fp8_learner: Annotated[bool | None, typer.Option("--fp8-learner", help="Train in FP8, too.")] = None,
    engine: Annotated[str | None, typer.Option(help="Engine: vllm or torch.  [vllm]")] = None,
    eager: Annotated[bool, typer.Option("--eager", help="Decode without CUDA graphs.")] = False,
    transport: Annotated[str | None, typer.Option(help="As sync.transport.  [object_store]")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time this machine's CPU instead of taking a GPU.")
    ] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Print the formulas' errors on published figures.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print values, not a table.")] = False,
) -> None:
    """Estimate tokens per second, memory, sync and step time in BF16, INT8 and FP8, and the best split of the GPUs, and
    say whether quantization pays. Needs no GPU and no network."""
    console = Console(width=_WIDTH)
    options = {
        "prompts": prompts,
        "samples": samples,
        "prompt": prompt_length,
        "response": response_length,
        "mean": mean_length,
        "updates": updates,
        "kept": kept,
        "slots": slots,
        "micro_tokens": micro_tokens,
        "staleness": staleness,
        "reference": reference,
        "critic": critic,
        "fp8_learner": fp8_learner,
        "engine": engine,
        "graphs": False if eager else None,
        "transport": transport,
    }
    with errors_told():
        if validate:
            show_published(console, as_json=as_json)
            return
        run = load_config(config) if config else None
        given = {name: value for name, value in options.items() if value is not None}
        shape, work = _asked(model, run, given)
        if measure:
            from qurl_ray.planning.measure import measure as measure_machine  # torch, seconds of imports

            show_machine(shape, work, measure_machine(shape, work), console, as_json=as_json)
            return
        kind = find_gpu(gpu)
        plan = make_plan(shape, kind, _gpus(gpus, run), work, tensor_parallel, fixed=given.keys())
        check = check_layout(shape, kind, work, run) if run and run.rollout.device == "cuda" else None
        if as_json:
            typer.echo(json.dumps(as_values(plan) | {"check": asdict(check) if check else None}, indent=2))
        else:
            show(plan, console, check)


def _gpus(given: int | None, run: RunConfig | None) -> int:
    if given is not None:
        return given
    return gpus_of(run) if run else 8


def _asked(model: str | None, run: RunConfig | None, given: dict[str, Any]) -> tuple[Shape, Workload]:
    """Return shape and workload. The options in `given` override the run's settings."""
    if run is None:
        if model is None:
            raise ConfigError("name a --model, or a run's --config")
        return find_shape(model), Workload(**given)
    shape = find_shape(model) if model else configured_shape(run.model)
    return shape, replace(configured_workload(run), **given)


if __name__ == "__main__":
    app(prog_name="python -m qurl_ray.planning")
