"""Settings of what a run records."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainSerializer, field_validator

from qurl_ray.config.paths import absolute_address
from qurl_ray.config.section import Section
from qurl_ray.config.shown import MARK, shown_address
from qurl_ray.errors import ConfigError
from qurl_ray.tables import SINKS

_VARIABLE = "MLFLOW_TRACKING_URI"


def _address(value: str) -> str:
    if not ("/" in value or value.startswith(("databricks", "uc"))):
        raise ValueError("is no address, such as http://HOST:5000, or sqlite:////FOLDER/mlflow.db")
    return value


MlflowUri = Annotated[str, AfterValidator(_address), PlainSerializer(shown_address)]
"""Address of MLflow, which may hold a password: `model_dump` returns it without, so that no file of a run has it."""


def known_uri(given: str | None) -> str | None:
    """Return `given`, or $MLFLOW_TRACKING_URI, if that is set, where `given` is None or lacks its password. The path of
    a local database is made absolute.

    Raises:
        ConfigError: it is no address.
    """
    uri = given if given and MARK not in given else os.environ.get(_VARIABLE) or given
    if not uri:
        return None
    try:
        return absolute_address(_address(uri))
    except ValueError as error:
        raise ConfigError(f"{'the URI of MLflow' if uri == given else f'${_VARIABLE}'} {error}") from None


def mlflow_address(given: str | None, folder: Path) -> str:
    """Return the address of MLflow: `known_uri`, else that of mlflow.db in `folder`.

    Raises:
        ConfigError: it is no address, or `given` lacks its password, as in the config.yaml of a run, and the variable
            is not set.
    """
    uri = known_uri(given)
    if uri and MARK in uri:
        raise ConfigError(
            f"the address of MLflow, {shown_address(uri)}, was written without its password: set ${_VARIABLE}, or give "
            "it whole"
        )
    return uri or f"sqlite:///{folder / 'mlflow.db'}"


class TrackingConfig(Section):
    """Where the figures of a run are recorded. metrics.jsonl is always written."""

    mlflow: bool = True
    """Also record the run in MLflow: settings, metrics, sampled rollouts, files and the final policy."""
    mlflow_uri: MlflowUri | None = Field(None, repr=False)
    """MLflow tracking server or database; null means $MLFLOW_TRACKING_URI if that is set, else mlflow.db, a SQLite file
    in `output_dir`. What a run writes holds the address without a password in it."""
    experiment: str = "qurl-ray"
    """Name of the MLflow experiment."""
    sinks: tuple[str, ...] = Field(
        (),
        description=f"Further receivers of events: {SINKS.help()}. Each is made with (run_dir, settings) and gets the "
        "events of the run (docs/extending.md).",
    )
    console: Literal["auto", "table", "plain", "none"] = "auto"
    """Output on the terminal: `table` is a live table with a progress bar; `plain` is one line per step; `none` is no
    output; `auto` is `table` on a terminal and `plain` elsewhere."""
    ray_dashboard: bool = False
    """Start Ray's dashboard, which also offers metrics to Prometheus, with a Ray that the run starts itself. A cluster
    has one anyway."""
    samples_per_step: int = Field(2, ge=0)
    """Number of rollouts of each step that are kept token by token, in samples.jsonl: one of each prompt, then a second
    one of each, and so on. prompts_per_step times samples_per_prompt keeps all of a round; 0 keeps none."""

    @field_validator("sinks")
    @classmethod
    def _sinks_are_known(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(SINKS.check(sink) for sink in sinks)
