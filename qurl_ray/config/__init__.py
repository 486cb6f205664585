"""Settings of a run: pydantic models, read from YAML plus dotted overrides. Imports neither torch nor ray.

Each section has a file; `run` joins them and, with `placement`, checks what concerns several of them. Class defaults
are vetted; the docstring under a field is its help. Every section is frozen and rejects unknown keys. Units are in the
names. The layers below get values from here, never a section itself, except where a section is their whole argument.
"""

from qurl_ray.config.load import load_config, resolve
from qurl_ray.config.run import RunConfig

__all__ = ["RunConfig", "load_config", "resolve"]
