"""Settings of checkpoints."""

from pydantic import Field

from qurl_ray.config.section import Section


class CheckpointConfig(Section):
    """Checkpoints: all that a killed run needs to resume, and the policy at that step. A run that ends before its last
    step, for example after Ctrl-C, always writes one."""

    every: int = Field(20, ge=0)
    """Number of steps between two checkpoints; 0 writes one only if the run ends before its last step."""
    grace_s: float = Field(1800, gt=0)
    """Seconds from a request to stop (Ctrl-C, SIGTERM, SIGHUP) until the run is aborted. Before that it ends its step,
    saves a checkpoint and evaluates. Let it be shorter than the time after which SIGKILL follows: by default 30 s under
    Kubernetes and Slurm, 3 s after `ray job stop`."""
    upload: str | None = None
    """Address in object storage to which every checkpoint is copied, in the background, and at the end the policy:
    `s3://bucket/folder` (pip install s3fs), or any other that fsspec knows. The folder of the run stays on this
    machine; a run whose folder is gone resumes from there. null copies nothing."""
    keep: int = Field(2, ge=1)
    """Number of latest checkpoints to keep, in addition to the one with the best held-out reward
    (`evaluation.every`)."""
