"""A training job, after its settings have been read."""

import typer

from qurl_ray.actors.placement import demand
from qurl_ray.config import RunConfig
from qurl_ray.config.idle import idle_settings
from qurl_ray.errors import ConfigError
from qurl_ray.loop.driver.functions import try_functions
from qurl_ray.loop.driver.run_dir import dry_run
from qurl_ray.planning.shapes import configured_shape
from qurl_ray.signals import StopRequests


def train(config: RunConfig, *, dry: bool, fresh: bool) -> int:
    """Train, or only check, print and save the settings. Returns the exit status: 128 and the signal's number after a
    request to stop (130 after Ctrl-C), 3 if the guard has stopped the run."""
    if dry:
        try_functions(config)
        typer.echo(dry_run(config), nl=False)
        typer.echo(f"# placement: {demand(config)}")
        for sentence in idle_settings(config):
            typer.echo(f"note: {sentence}", err=True)
        if promise := _equal_bits(config):
            typer.echo(f"# {promise}")
        return 0
    stops = StopRequests()
    try:
        with stops.caught():
            from qurl_ray.loop.driver.run import run_until  # imports take seconds: --help and dry runs skip them

            result = run_until(stops, config, fresh=fresh)
    except KeyboardInterrupt:
        typer.echo("aborted", err=True)
        return stops.exit_status
    if result.summary["stopped_by_guard"]:
        return 3
    return stops.exit_status if result.interrupted else 0


def _equal_bits(config: RunConfig) -> str | None:
    """Return this machine's promise of equal bits in words; None unless engine and learner share one forward pass and
    the model's shape is known."""
    if not config.shares_forward():
        return None
    try:
        shape = configured_shape(config.model)
    except ConfigError:
        return None
    from qurl_ray.numerics.promise import promise_of  # which imports torch

    return promise_of(shape.linears(), head_dim=shape.head_dim).sentence()
