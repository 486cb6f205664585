"""Serve the final policy through OpenAI's API, on Ray Serve: serve run qurl_ray.serving:app policy=runs/quickstart"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, str]) -> "Application":
    """Return the app for `serve run` and `serve deploy`. Host and port are those of Ray Serve, not of the settings.

    Args:
        args: settings of config.serving, as key=value on the command line.

    Raises:
        QurlError: a setting is wrong, or there is no such policy.
    """
    from qurl_ray.config.serving import load_serving, resolve_serving
    from qurl_ray.serving.deploy import application
    from qurl_ray.serving.policies import pin

    config = resolve_serving(load_serving(None, [f"{key}={value}" for key, value in args.items()]))
    pinned = pin(config)
    return application(config, pinned, name=config.name or pinned.name)
