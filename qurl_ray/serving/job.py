"""Work of `qurl serve` after its settings are read."""

import threading
from typing import TYPE_CHECKING

import typer
import yaml

from qurl_ray.config.serving import ServingConfig, resolve_serving
from qurl_ray.config.shown import shown
from qurl_ray.errors import ConfigError
from qurl_ray.serving.control import ask_to_swap, listening
from qurl_ray.signals import StopRequests

if TYPE_CHECKING:
    from qurl_ray.serving.deploy import App


def serve(config: ServingConfig, *, dry: bool, swap: bool) -> int:
    """Serve, or check and print the settings, or swap the policy of the running app. Return the exit status.

    It serves until it is asked to stop, as by Ctrl-C. Requests in flight then end, and the status is 0; after another
    request, or one while it starts, the status is 128 and the signal's number.
    """
    config = resolve_serving(config)
    if dry:
        return _dry_run(config)
    if swap:
        if config.policy is None:
            raise ConfigError("--swap needs policy=…, the policy to swap to")
        typer.echo(ask_to_swap(config.port, config.policy, timeout_s=config.start_timeout_s))
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


def _dry_run(config: ServingConfig) -> int:
    from qurl_ray.serving.deploy import api_key
    from qurl_ray.serving.policies import MODELS, pin

    api_key(config)
    checked, unchecked = ["settings", "host and key"], None
    if config.policy and config.policy.startswith(MODELS):
        unchecked = f"the policy, as MLflow would be asked for {config.policy}"
    else:
        checked.append(f"the policy {pin(config).source}")
    typer.echo(yaml.safe_dump(shown(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True), nl=False)
    typer.echo(f"# checked: {'; '.join(checked)}")
    if unchecked:
        typer.echo(f"# not checked: {unchecked}")
    return 0


def _serve_until(stops: StopRequests, app: "App") -> None:
    config = app.config
    try:
        stops.check()
        typer.echo(f"{app.name}: {app.pinned.source}")
        typer.echo(f"serving http://{config.host}:{config.port}/v1 (Ctrl-C ends it)")
        if config.follow_s:
            for sentence in app.follow(config.follow_s):
                typer.echo(sentence)
        threading.Event().wait()
    except KeyboardInterrupt:
        typer.echo(f"{stops.signals[0].name}: requests in flight end first; once more aborts them", err=True)
