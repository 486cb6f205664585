"""A training job, after its settings have been read."""

import typer

from qurl_ray.actors.placement import demand
from qurl_ray.config import RunConfig
from qurl_ray.config.idle import idle_settings
from qurl_ray.errors import ConfigError
from qurl_ray.extensions import announced_if_slow
from qurl_ray.signals import StopRequests
from qurl_ray.training.deadlines import CHECKS, MODEL_S, PROBLEMS_S, stage_deadline

# Modules that need torch or Ray take seconds to import, so they are imported where they are used: --help does without
# them, and a mistake is told before later checks import more.


def run_job(config: RunConfig, *, dry: bool, fresh: bool, extend: bool = False) -> int:
    """Train, or only check and print the settings. Returns the exit status: 128 and the signal's number after a request
    to stop (130 after Ctrl-C), 3 if the guard has stopped the run."""
    if dry:
        return _dry_run(config, fresh=fresh, extend=extend)
    stops = StopRequests()
    try:
        with stops.caught(then_exit=True):
            with announced_if_slow(CHECKS), stage_deadline(CHECKS, PROBLEMS_S):
                from qurl_ray.training.driver.early import check_early

                early = check_early(config)
            stage = "importing transformers, and checking the model"
            if config.tracking.console != "none":  # there is no console of the run yet
                typer.echo(stage, err=True)
            with stage_deadline(stage, MODEL_S):
                from qurl_ray.training.driver.prepare import check_run

                checked = check_run(early)
                from qurl_ray.training.driver.run import run_until

            result = run_until(stops, checked, fresh=fresh, extend=extend)
    except KeyboardInterrupt as aborted:
        typer.echo("\n".join(["aborted", *getattr(aborted, "__notes__", ())]), err=True)
        return stops.exit_status
    if result.summary["stopped_by_guard"]:
        return 3
    return stops.exit_status if result.interrupted else 0


def _dry_run(config: RunConfig, *, fresh: bool, extend: bool) -> int:
    """Check a run without starting it, and print the result.

    Raises:
        ConfigError: the run would be refused on this machine.
    """
    from qurl_ray.training.driver.early import check_early

    early = check_early(config, dry=True)
    from qurl_ray.training.driver.dry_run import dry_run

    result = dry_run(early, fresh=fresh, extend=extend)
    typer.echo(result.settings, nl=False)
    typer.echo(f"# placement: {demand(config)}")
    if result.invariance:
        typer.echo(f"# {result.invariance}")
    for line in result.example:
        typer.echo(f"# {line}")
    for sentence in [*idle_settings(config), *result.notes]:
        typer.echo(f"note: {sentence}", err=True)
    for heading, parts in (("checked", result.checked), ("not checked", result.unchecked)):
        typer.echo("\n#   ".join([f"# {heading}:", *parts]))
    if result.missing:
        raise ConfigError(result.missing)
    return 0
