"""Work of `qurl serve` after its settings are read."""

import os
import threading

import typer
import yaml

from qurl_ray.config.serving import ServingConfig, resolve_serving
from qurl_ray.config.shown import shown
from qurl_ray.errors import ConfigError
from qurl_ray.serving.record import read_record
from qurl_ray.signals import StopRequests


def serve(config: ServingConfig, *, dry: bool, swap: bool) -> int:
    """Serve, or check and print the settings, or swap the policy of the running app. Return the exit status.

    It serves until it is asked to stop, as by Ctrl-C. Requests in flight then end, and the status is 0; after another
    request, or one while it starts, the status is 128 and the signal's number.
    """
    config = resolve_serving(config)
    if dry:
        return _dry_run(config)
    if swap:
        return _swap(config)
    from qurl_ray.serving import deploy  # takes seconds to import; the cases above do not need it

    stops = StopRequests()
    try:
        with stops.caught(), deploy.running(config, stops) as pinned:
            metrics = deploy.metrics_address()
            try:
                stops.check()
                typer.echo(f"serving {pinned.source}, metrics at {metrics}")
                typer.echo(f"OpenAI's API at http://{config.host}:{config.port}/v1 (Ctrl-C ends it)")
                threading.Event().wait()
            except KeyboardInterrupt:
                typer.echo(f"{stops.signals[0].name}: requests in flight end first; once more aborts them", err=True)
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


def _swap(config: ServingConfig) -> int:
    if config.policy is None and not config.adapters:
        raise ConfigError("--swap needs policy=…, the policy to swap to, or adapters=…, those beside it")
    record = read_record(config.port)
    os.environ |= record.environment
    from qurl_ray.serving.deploy import swap  # Ray reads the environment when it is imported

    typer.echo(swap(record, config.policy, config.adapters))
    return 0
