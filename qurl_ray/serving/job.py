"""Work of jobs/serve.py after its settings are read."""

import signal
import threading
from pathlib import Path

import typer
import yaml

from qurl_ray.config.serving import ServingConfig
from qurl_ray.errors import ConfigError
from qurl_ray.serving.control import ask_to_swap, listening


def serve(config: ServingConfig, *, dry: bool, swap: bool) -> int:
    """Serve until Ctrl-C, or print the settings, or swap the policy of the running app. Return the exit status."""
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
    from qurl_ray.serving.deploy import running  # takes seconds to import; the cases above do not need it

    for one in (signal.SIGINT, signal.SIGTERM):  # a shell's background ignores SIGINT; SIGTERM drains, too
        signal.signal(one, signal.default_int_handler)
    try:
        with running(config) as app, listening(config.port, app.swap_to):
            typer.echo(f"{app.name}: {app.pinned.source}")
            typer.echo(f"serving http://{config.host}:{config.port}/v1 (Ctrl-C ends it)")
            try:
                if config.follow_s:
                    for sentence in app.follow(config.follow_s):
                        typer.echo(sentence)
                threading.Event().wait()
            except KeyboardInterrupt:
                typer.echo("draining: requests in flight end first", err=True)
    except KeyboardInterrupt:
        typer.echo("aborted", err=True)
        return 130
    return 0
