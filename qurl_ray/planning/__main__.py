"""Command line: python -m qurl_ray.planning --model Qwen/Qwen2.5-7B --gpu h100 --gpus 8 --response-length 8192"""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from qurl_ray.config.cli import errors_told
from qurl_ray.config.load import load_config
from qurl_ray.errors import ConfigError
from qurl_ray.planning.machines import GPUS, WITHOUT_KERNEL, find_format, find_gpu
from qurl_ray.planning.memory import check_layout
from qurl_ray.planning.plan import make_plan
from qurl_ray.planning.report import as_values, show
from qurl_ray.planning.shapes import SHAPES, configured_shape, find_shape
from qurl_ray.planning.workload import Workload, configured_workload, gpus_of

_WIDTH = 110
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=f"Models known by name: {', '.join(SHAPES)}.\n\nDocumentation: docs/choosing.md")
def main(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Name (see below), or a folder with a config.json.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A run's YAML file, or one of `qurl configs`: model, lengths, batch and GPUs are its own."),
    ] = None,
    gpu: Annotated[str, typer.Option(help=f"Kind of GPU: {', '.join(GPUS)}.")] = "h100",
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs; those of --config, or 8, if absent.")] = None,
    # Names of the following parameters, but formats and tensor_parallel, are fields of Workload.
    prompts: Annotated[int | None, typer.Option(help="Prompts of a step that are learned from.  [128]")] = None,
    samples: Annotated[int | None, typer.Option(help="Answers to each prompt.  [8]")] = None,
    prompt: Annotated[int | None, typer.Option("--prompt-length", help="Tokens, on average.  [256]")] = None,
    response: Annotated[
        int | None, typer.Option("--response-length", help="Limit of an answer, in tokens.  [8192]")
    ] = None,
    mean: Annotated[
        float | None,
        typer.Option("--mean-length", help="Mean length of answers, in tokens.  [a quarter of the limit]"),
    ] = None,
    updates: Annotated[int | None, typer.Option(help="Number of updates per step.  [4]")] = None,
    kept: Annotated[float | None, typer.Option(help="Share of groups that dynamic sampling keeps.  [1]")] = None,
    slots: Annotated[int | None, typer.Option(help="Sequences that an engine decodes at a time.  [512]")] = None,
    staleness: Annotated[int | None, typer.Option(help="Steps that rollouts may run ahead.  [0]")] = None,
    reference: Annotated[bool | None, typer.Option("--reference", help="With a KL penalty.")] = None,
    critic: Annotated[bool | None, typer.Option("--critic", help="With a value model.")] = None,
    fp8_learner: Annotated[bool | None, typer.Option("--fp8-learner", help="Train in FP8, too.")] = None,
    formats: Annotated[
        str | None, typer.Option(help=f"More formats, for a kernel that is not here yet: {', '.join(WITHOUT_KERNEL)}.")
    ] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="GPUs of an engine; the best number if absent.")] = None,
    transport: Annotated[
        str | None, typer.Option(help="object_store, ipc or nccl, as sync.transport; the best if absent.")
    ] = None,
    micro_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one learner's pass; 8192, or fewer if that is better, if absent.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print values, not a table.")] = False,
) -> None:
    """Estimate tokens per second, memory, sync and step time in BF16, INT8 and FP8, and the best split of the GPUs, and
    say whether quantization pays. Needs no GPU and no network."""
    names = {field.name for field in fields(Workload)}
    given = {name: value for name, value in context.params.items() if name in names and value is not None}
    with errors_told():
        run = load_config(config) if config else None
        if model:
            shape = find_shape(model)
        elif run:
            shape = configured_shape(run.model)
        else:
            raise ConfigError("name a --model, or a run's --config")
        work = replace(configured_workload(run) if run else Workload(), **given)
        kind = find_gpu(gpu)
        if gpus is None:
            gpus = gpus_of(run) if run else 8
        more = [find_format(name.strip()) for name in (formats or "").split(",") if name.strip()]
        plan = make_plan(shape, kind, gpus, work, tensor_parallel, fixed=given.keys(), more=more)
        check = check_layout(shape, kind, work, run) if run and run.rollout.device == "cuda" else None
        if as_json:
            typer.echo(json.dumps(as_values(plan, check), indent=2))
        else:
            show(plan, Console(width=_WIDTH), check)


if __name__ == "__main__":
    app(prog_name="python -m qurl_ray.planning")
