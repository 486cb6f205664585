"""Settings of serving a policy, from YAML plus key=value overrides, and the command line that takes them."""

import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import Field, StringConstraints, ValidationError, model_validator

from qurl_ray.config.cli import errors_told
from qurl_ray.config.help import COMMAND, HelpFlag, Overrides, help_page
from qurl_ray.config.load import explain, given, read_settings, runs_folder
from qurl_ray.config.paths import absolute
from qurl_ray.config.rollout import FormatName
from qurl_ray.config.section import Section
from qurl_ray.config.tracking import MlflowUri, known_uri
from qurl_ray.errors import ConfigError
from qurl_ray.extensions import did_you_mean

API_KEY = "QURL_API_KEY"
"""Environment variable that holds the API key. Without it, only clients on this machine are answered, unless `open`."""

_MODEL = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
"""Names of models for clients."""


class ServingConfig(Section):
    """Settings of one app that serves one policy, and its successors."""

    policy: str | None = None
    """Policy to serve: a folder (that of a run, or of a model), `models:/name/version` in MLflow (also
    `models:/name/latest` and `models:/name@alias`), or the name of a run in output_dir. null means the latest finished
    run there."""
    output_dir: Path | None = None
    """Folder that holds the run folders; null means $QURL_RUNS if that is set, else ./runs."""
    mlflow_uri: MlflowUri | None = Field(None, repr=False)
    """MLflow tracking server or database with the registered models; null means $MLFLOW_TRACKING_URI if that is set,
    else mlflow.db, a SQLite file in output_dir."""
    name: str | None = Field(None, pattern=_MODEL)
    """Name of the model for clients; null means the run's or registered model's name. It stays when the policy is
    swapped."""
    quantization: Literal["auto"] | FormatName = "auto"
    """Number format of the linears: `auto` takes a run's adapter over its own codes, or its exported codes
    (policy-int8), or else what the folder holds; `none` is full precision; any other is a format of
    `rollout.quantization`, to which a full-precision policy is quantized when it is loaded."""
    adapters: dict[Annotated[str, StringConstraints(pattern=_MODEL)], str] = {}
    """Adapters beside the policy, {name: folder in PEFT's layout, or a run}: a request whose `model` is such a name is
    answered with that adapter, the others with the policy alone. All are of one base model, which is the policy; with
    policy=null it is theirs, in the codes over which they were trained."""
    slots: int = Field(32, ge=1)
    """Answers that a replica generates at a time."""
    max_length: int | None = Field(None, ge=8)
    """Context length (prompt and answer together), in tokens. null means the model's own, at most 2048."""
    max_tokens: int = Field(1024, ge=1)
    """Largest number of tokens that a request may ask for in an answer (its max_tokens)."""
    max_choices: int = Field(16, ge=1)
    """Largest number of answers to one request, which is n times its prompts."""
    max_body_kb: int = Field(1024, ge=1)
    """Largest size of a request's body, in KiB (1024 bytes)."""
    queue: int = Field(64, ge=0)
    """Number of answers that may wait for a slot of a replica; requests beyond that are refused with status 429."""
    silent_s: float = Field(60.0, gt=0)
    """Longest time without a token from an engine that has work, in seconds; after it the replica is unhealthy, and is
    restarted."""
    replicas: int = Field(1, ge=1)
    """Number of replicas at the start, and the smallest number."""
    max_replicas: int | None = Field(None, ge=1)
    """Largest number of replicas: the app adds replicas up to it when more is asked than the `slots` of each can take,
    and removes them again. null means `replicas`."""
    threads: int | None = Field(None, ge=1)
    """Number of CPU threads of a replica, and of CPUs that it takes in Ray. null divides all cores by the largest
    number of replicas."""
    host: str = "127.0.0.1"
    """Address to listen on. An address other than loopback needs a key in $QURL_API_KEY, or `open=true`."""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port to listen on."""
    open: bool = False
    """Answer every client that can connect, from anywhere, if there is no key."""
    drain_s: float = Field(60.0, gt=0)
    """Time that answers in flight may take to end when a replica stops, or the server is asked to, in seconds."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Deadline for the replicas to load a policy, in seconds."""
    template: str = "{prompt}"
    r"""Prompt made from messages if the tokenizer has no chat template: {prompt} is replaced by their contents, joined
    by \n."""

    @model_validator(mode="after")
    def _parts_agree(self) -> "ServingConfig":
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) is below replicas ({self.replicas})")
        if self.max_choices > self.slots + self.queue:
            raise ValueError(
                f"max_choices ({self.max_choices}) exceeds slots + queue ({self.slots + self.queue}): a request for "
                "that many answers could never be accepted"
            )
        if "{prompt}" not in self.template:
            raise ValueError(f"template must contain {{prompt}}, got {self.template!r}")
        return self

    @property
    def most_replicas(self) -> int:
        """Largest number of replicas, `max_replicas` resolved."""
        return self.max_replicas or self.replicas

    def check_host(self, *, key: bool) -> None:
        """Raise ConfigError if other machines could send requests without a key."""
        if not (key or self.open or is_loopback(self.host)):
            raise ConfigError(
                f"host={self.host} lets other machines send requests: set an API key in ${API_KEY}, or open=true to "
                "answer without a key"
            )


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_serving(path: Path | None, overrides: Sequence[str] = ()) -> ServingConfig:
    """Read `path` (defaults if None), apply `key=value` overrides, validate.

    Raises:
        ConfigError: as load_config.
    """
    return validated(read_settings(path, overrides, ServingConfig), str(path) if path else "settings")


def resolve_serving(config: ServingConfig) -> ServingConfig:
    """Return the settings with absolute paths, since the processes of an app work in other folders.

    Raises:
        ConfigError: see runs_folder and known_uri.
    """
    resolved = {"output_dir": runs_folder(config.output_dir), "mlflow_uri": known_uri(config.mlflow_uri)}
    policy = config.policy and absolute(config.policy)
    adapters = {name: absolute(path) for name, path in config.adapters.items()}
    return config.model_copy(update={**resolved, "policy": policy, "adapters": adapters})


def validated(settings: dict[str, Any], source: str) -> ServingConfig:
    """Return the settings, or raise a ConfigError with a line for each error."""
    try:
        return ServingConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain(error, source, _fault)) from None


def _fault(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {key!r}{did_you_mean(key, ServingConfig.model_fields, cutoff=0.5)}"
    return f"{key or 'config'}: {item['msg'].removeprefix('Value error, ')}{given(item) if key else ''}"


def serving_app(serve: Callable[..., int], about: str | None = None) -> typer.Typer:
    """Return a program whose only command is `serving_command(serve, about)`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(**COMMAND)(serving_command(serve, about))
    return app


def serving_command(serve: Callable[..., int], about: str | None = None) -> Callable[..., None]:
    """Return a command that reads settings and calls `serve(config, dry=…, swap=…)`, which returns the exit status.

    Args:
        about: Docstring of the job: a sentence, a colon, and an example of use.
    """

    def main(
        context: typer.Context,
        overrides: Overrides = None,
        config: Annotated[Path | None, typer.Option(help="YAML file with settings; defaults if absent.")] = None,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Make the checks of a start, print the settings, and stop.")
        ] = False,
        swap: Annotated[
            bool, typer.Option("--swap", help="Swap the app that runs on this machine to `policy`, and return.")
        ] = False,
        show_help: HelpFlag = False,
    ) -> None:
        with errors_told():
            if show_help:
                typer.echo(help_page(context, ServingConfig, overrides or [], about))
                return
            status = serve(load_serving(config, overrides or []), dry=dry_run, swap=swap)
        raise typer.Exit(status)

    return main
