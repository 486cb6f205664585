"""How a policy is served: settings, from YAML plus key=value overrides, and the command line that takes them."""

import difflib
import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import Field, ValidationError, model_validator

from qurl_ray.config.load import describe, read_settings
from qurl_ray.config.rollout import Format
from qurl_ray.config.section import Section
from qurl_ray.errors import ConfigError, QurlError


class ServingConfig(Section):
    """One app that serves one policy, and its successors."""

    policy: str | None = None
    """A folder (that of a run, or of a model), `models:/name/version` in MLflow (also `models:/name/latest` and
    `models:/name@alias`), or the name of a run in output_dir. The latest finished run there if absent."""
    output_dir: Path | None = None
    """Where run folders are; $QURL_RUNS, or ./runs if absent."""
    mlflow_uri: str | None = None
    """Tracking server or database with the registered models; sqlite in output_dir if absent."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    """What clients call the model; the run's or registered model's name if absent. It stays when the policy is
    swapped."""
    engine: Literal["torch", "vllm"] = "torch"
    """`torch` is embedded: on a CPU a request's answer depends on nothing but itself. `vllm` is vLLM 0.32."""
    quantization: Literal["auto"] | Format = "auto"
    """Format of the block linears. `auto` takes a run's exported codes (policy-int8) where there are some, else what
    the folder holds; a format quantizes a policy in full precision as it is loaded."""
    kernel: Literal["auto", "emulation"] = "auto"
    """As quantization.kernel of a run."""
    device: Literal["cpu", "cuda"] = "cpu"
    """`cuda` gives each replica a GPU of its own, or `tensor_parallel` of them. Not measured yet."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations, and of weights that are not quantized. bfloat16 is for GPUs."""
    tensor_parallel: int = Field(1, ge=1)
    """Processes (GPUs on CUDA) that share one vLLM engine's weights."""
    kv_cache_gb: float | None = Field(None, gt=0)
    """Memory for keys and values of a vLLM engine. If absent, a CPU takes what `slots` full contexts need, a GPU what
    is free."""
    slots: int = Field(32, ge=1)
    """Answers that a replica generates at a time."""
    max_length: int | None = Field(None, ge=8)
    """Tokens of prompt and answer together; the model's own, at most 2048, if absent."""
    max_tokens: int = Field(1024, ge=1)
    """Largest max_tokens of a request."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt; what max_length leaves if absent."""
    max_choices: int = Field(16, ge=1)
    """Most answers to one request: n times its prompts."""
    max_body_kb: int = Field(1024, ge=1)
    """Largest body of a request."""
    body_timeout_s: float = Field(10.0, gt=0)
    """Deadline for the body of a request to arrive."""
    queue: int = Field(64, ge=0)
    """Answers that may wait for a slot of a replica. Beyond that a request is turned away with 429."""
    retry_after_s: int = Field(1, ge=1)
    """What a client that was turned away is told to wait."""
    silent_s: float = Field(60.0, gt=0)
    """A replica whose engine works but tells of no token for so long is unhealthy, and is started anew."""
    replicas: int = Field(1, ge=1)
    """Replicas to begin with."""
    max_replicas: int | None = Field(None, ge=1)
    """Grow to so many when more is asked than `slots` of each can take, and shrink again; absent is `replicas`."""
    upscale_after_s: float = Field(10.0, ge=0)
    downscale_after_s: float = Field(120.0, ge=0)
    threads: int | None = Field(None, ge=1)
    """CPU threads of a replica, and CPUs that it takes in Ray; all cores divided by the most replicas if absent."""
    host: str = "127.0.0.1"
    """Address to bind. Others than loopback need a key in the environment, or `open=true`."""
    port: int = Field(8000, ge=0, le=65535)
    api_key_env: str = "QURL_API_KEY"
    """Environment variable that holds the key. Without one everybody may ask."""
    open: bool = False
    """Answer everybody that can connect, from anywhere, without a key."""
    drain_s: float = Field(60.0, gt=0)
    """How long answers in flight may take to end when a replica stops."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Deadline for the replicas to load a policy."""
    follow_s: float | None = Field(None, gt=0)
    """Look every so many seconds whether `policy` means another one by now, and swap to it."""
    template: str = "{prompt}"
    r"""How messages become a prompt if the tokenizer has no chat template: {prompt} is what they say, joined by \n."""

    @model_validator(mode="after")
    def _parts_agree(self) -> "ServingConfig":
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) is below replicas ({self.replicas})")
        if self.max_choices > self.slots + self.queue:
            raise ValueError(
                f"max_choices ({self.max_choices}) exceeds slots + queue ({self.slots + self.queue}): a request with "
                "so many could never be taken"
            )
        if "{prompt}" not in self.template:
            raise ValueError(f"template must contain {{prompt}}, got {self.template!r}")
        if self.dtype == "bfloat16" and self.engine == "torch" and self.device == "cpu":
            raise ValueError("dtype=bfloat16 is for GPUs and for vLLM")
        return self

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.replicas

    def check_host(self, *, key: bool) -> None:
        """Raise ConfigError if strangers could ask without a key."""
        if not (key or self.open or is_loopback(self.host)):
            raise ConfigError(
                f"host={self.host} lets other machines ask: set a key in ${self.api_key_env}, or open=true to answer "
                "everybody"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_serving(path: Path | None, overrides: Sequence[str] = ()) -> ServingConfig:
    """Read `path` (defaults if None), apply `key=value` overrides in order, validate.

    Raises:
        ConfigError: as load_config.
    """
    return validated(read_settings(path, overrides), str(path) if path else "settings")


def validated(settings: dict[str, Any], source: str) -> ServingConfig:
    """The settings, or a ConfigError with a line for each fault."""
    try:
        return ServingConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_fault(item)}" for item in error.errors())) from None


def _fault(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(key, ServingConfig.model_fields, n=1, cutoff=0.5)
        return f"unknown key {key!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
    given = f" (got {item['input']!r})" if key else ""
    return f"{key or 'config'}: {item['msg'].removeprefix('Value error, ')}{given}"


def serving_app(serve: Callable[..., int]) -> typer.Typer:
    """A command that reads settings and calls `serve(config, dry=…, swap=…)`, which returns the exit status.

    Errors that qurl_ray raises on purpose are printed without a traceback.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    rows = [f"{key} = {default}  {text}" for key, default, text in describe(ServingConfig)]

    @app.command(epilog="Settings (key = default):\n\n" + "\n\n".join(rows))
    def main(
        overrides: Annotated[
            list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file's.")
        ] = None,
        config: Annotated[Path | None, typer.Option(help="YAML file with settings; defaults if absent.")] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print the settings; stop.")] = False,
        swap: Annotated[
            bool, typer.Option("--swap", help="Swap the app that runs on this machine to `policy`, and return.")
        ] = False,
    ) -> None:
        """Serve a policy with OpenAI's API until Ctrl-C."""
        try:
            status = serve(load_serving(config, overrides or []), dry=dry_run, swap=swap)
        except QurlError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        raise typer.Exit(status)

    return app
