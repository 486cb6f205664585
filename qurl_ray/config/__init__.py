"""Settings of a run: pydantic models, read from YAML plus dotted overrides. Imports neither torch nor ray."""

from qurl_ray.config.load import load_config, resolve
from qurl_ray.config.models import RunConfig

__all__ = ["RunConfig", "load_config", "resolve"]
