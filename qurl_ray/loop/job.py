"""What a training job does once its settings are read."""

import typer

from qurl_ray.actors.placement import demand
from qurl_ray.config import RunConfig
from qurl_ray.config.idle import idle_settings
from qurl_ray.loop.run_dir import dry_run


def train(config: RunConfig, *, dry: bool, fresh: bool) -> int:
    """Train, or only check, print and save the settings. Returns the exit status: 130 after Ctrl-C, 3 if the guard has
    stopped the run."""
    if dry:
        typer.echo(dry_run(config), nl=False)
        typer.echo(f"# placement: {demand(config)}")
        for sentence in idle_settings(config):
            typer.echo(f"note: {sentence}", err=True)
        return 0
    from qurl_ray.loop.run import run  # seconds of imports, which --help and dry runs need not wait for

    try:
        result = run(config, fresh=fresh)
        if result.summary["stopped_by_guard"]:
            return 3
        return 130 if result.interrupted else 0
    except KeyboardInterrupt:
        typer.echo("aborted", err=True)
        return 130
