"""qurl evaluate: how many held-out problems a policy solves."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console
from rich.progress import Progress

from qurl_ray.config import load_config
from qurl_ray.config.cli import errors_told
from qurl_ray.config.load import run_folder
from qurl_ray.config.rollout import FormatName
from qurl_ray.extensions import find_modules_here

if TYPE_CHECKING:
    from qurl_ray.evaluation.statistics import Estimate


def main(
    run: Annotated[
        Path,
        typer.Argument(help="A run by its folder or name, with the task; its policy/ is evaluated, or its adapter/."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Override the run's settings.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Evaluate this folder instead; codes are used as they are.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Take the task from this file instead of RUN/config.yaml.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help=f"{', '.join(get_args(FormatName))}.", show_default="the checkpoint's own")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="k of avg@k and pass@k; 0 is greedy answers only.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.01, help="Sampling temperature of the k samples.")] = 1.0,
    against: Annotated[
        Path | None,
        typer.Option(help="Compare with the policy in this folder: reward by problem, and KL, nats per token."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the figures here, as JSON.")] = None,
) -> None:
    """Evaluate greedy answers to held-out problems: mean reward and problems solved (reward > 0.5); also avg@k and
    pass@k.

    All have 95 % intervals. Where every reward is 0 or 1, the mean reward is the share solved and is not repeated.
    """
    from qurl_ray.evaluation.evaluate import evaluate  # torch, seconds of imports
    from qurl_ray.policy.adapters import is_adapter

    find_modules_here()
    with errors_told():
        run = run_folder(run)
        settings = load_config(config or run / "config.yaml", overrides or [])
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("answers judged")
            report = evaluate(
                settings,
                policy or (run / "adapter" if is_adapter(run / "adapter") else run / "policy"),
                quantization=quantization,
                samples=samples,
                temperature=temperature,
                against=against,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    show_rewards("reward", report.reward, report.accuracy)
    show_share("solved", report.accuracy)
    if report.avg_reward_at_k and report.avg_at_k and report.pass_at_k:
        show_rewards(f"reward@{samples}", report.avg_reward_at_k, report.avg_at_k)
        show_share(f"avg@{samples}", report.avg_at_k)
        show_share(f"pass@{samples}", report.pass_at_k)
    for name, (mean, solved) in report.sets.items():
        show_rewards(name, mean, solved)
        show_share(name, solved)
    if other := report.against:
        typer.echo(f"against {other.policy} ({_weights(other.quantization)} weights):")
        show_estimate("reward", other.reward, f"mean of {other.reward.n} problems")
        show_estimate("difference", other.difference, "reward by problem, this policy minus the other")
        show_estimate("KL", other.kl, "nats per token, KL(this ‖ other)")
    computed = f" ({', '.join(report.kernels)})" if report.kernels else ""
    weights = _weights(report.quantization)
    typer.echo(f"{weights} weights{computed}, {report.seconds:.1f} s, {report.failed_rewards} rewards failed")
    if out:
        out.write_text(json.dumps(report.as_dict(), indent=2) + "\n")


def show_rewards(name: str, mean: "Estimate", solved: "Estimate") -> None:
    """Print one line: the mean reward and its interval. Print nothing where it is the share solved."""
    if mean.value != solved.value:
        show_estimate(name, mean, f"mean of {mean.n} problems")


def show_estimate(name: str, estimate: "Estimate", meaning: str) -> None:
    """Print one line: the value, its interval, and what they are of."""
    digits = 4 if 0 < abs(estimate.value) < 0.05 else 3
    value, low, high = (f"{number:.{digits}f}" for number in (estimate.value, estimate.low, estimate.high))
    typer.echo(f"{name:10} {value:>7}  [{low}, {high}]  {meaning}")


def _weights(quantization: str) -> str:
    return "full-precision" if quantization == "none" else quantization


def show_share(name: str, estimate: "Estimate") -> None:
    """Print one line: the value and its interval, in percent."""
    low, high = 100 * estimate.low, 100 * estimate.high
    typer.echo(f"{name:10} {100 * estimate.value:5.1f} %  [{low:.1f}, {high:.1f}]  of {estimate.n} problems")
