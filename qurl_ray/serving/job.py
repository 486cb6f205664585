"""Work of jobs/serve.py after its settings are read."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import typer
import yaml

from qurl_ray.config.serving import ServingConfig
from qurl_ray.errors import ConfigError
from qurl_ray.serving.control import ask_to_swap, listening
from qurl_ray.signals import StopRequests

if TYPE_CHECKING:
    from qurl_ray.serving.deploy import App


def serve(config: ServingConfig, *, dry: bool, swap: bool) -> int:
    """Serve, or print the settings, or swap the policy of the running app. Return the exit status.

    It serves until it is asked to stop, as by Ctrl-C. Requests in flight then end, and the status is 0; after another
    request, or one while it starts, the status is 128 and the signal's number.
    """
    if dry:
        typer.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)
        return 0
    if swap:
        if config.policy is None:
            raise ConfigError("--swap needs policy=…, the policy to swap to")
        here = Path(config.policy)  # the serving job may run in another folder
        policy = str(here.resolve()) if here.exists() else config.policy
        typer.echo(ask_to_swap(config.port, policy, timeout_s=config.start_timeout_s))
        return 0
    stops = StopRequests()
    try:
        with stops.caught():
            from qurl_ray.serving.deploy import running  # takes seconds to import; the cases above do not need it

            with running(config, stops) as app, listening(config.port, app.swap_to):
                _serve_until(stops, app)
        if len(stops.signals) > 1:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        typer.echo("aborted", err=True)
        return stops.exit_status
    return 0


def _serve_until(stops: StopRequests, app: "App") -> None:
    config = app.config
    try:
        typer.echo(f"{app.name}: {app.pinned.source}")
        typer.echo(f"serving http://{config.host}:{config.port}/v1 (Ctrl-C ends it)")
        if config.follow_s:
            for sentence in app.follow(config.follow_s):
                typer.echo(sentence)
        threading.Event().wait()
    except KeyboardInterrupt:
        typer.echo(f"{stops.signals[0].name}: requests in flight end first; once more aborts them", err=True)
