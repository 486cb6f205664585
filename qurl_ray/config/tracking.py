"""Settings of what a run records."""

from typing import Literal

from pydantic import Field, field_validator

from qurl_ray.config.section import Section
from qurl_ray.tables import SINKS


class TrackingConfig(Section):
    """Where the figures of a run are recorded. metrics.jsonl is always written."""

    mlflow: bool = True
    """Also record the run in MLflow: settings, metrics, sampled rollouts, files and the final policy."""
    mlflow_uri: str | None = None
    """MLflow tracking server or database; null means mlflow.db, a SQLite file in `output_dir`."""
    experiment: str = "qurl-ray"
    """Name of the MLflow experiment."""
    sinks: tuple[str, ...] = ()
    """Receivers of your own, each `package.module:Class` or an entry point of the group qurl_ray.sinks. Each is made
    with (run_dir, settings) and gets the events of the run (docs/extending.md)."""
    console: Literal["auto", "table", "plain", "none"] = "auto"
    """Output on the terminal: `table` is a live table with a progress bar; `plain` is one line per step; `none` is no
    output; `auto` is `table` on a terminal and `plain` elsewhere."""
    samples_per_step: int = Field(2, ge=0)
    """Number of rollouts of each step that are kept token by token, in samples.jsonl: one of each prompt, then a second
    one of each, and so on. prompts_per_step times samples_per_prompt keeps all of a round; 0 keeps none."""

    @field_validator("sinks")
    @classmethod
    def _sinks_are_known(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(SINKS.check(sink) for sink in sinks)
