"""Settings of the transfer of weights to the engines."""

from typing import Literal

from pydantic import Field, field_validator

from qurl_ray.config.section import Section
from qurl_ray.tables import TRANSPORTS


class SyncConfig(Section):
    """Weight transfer from learner to engines."""

    transport: str = Field(
        "object_store",
        description=f"How weights travel to the engines: {TRANSPORTS.help()}. `nccl` and `ipc` send "
        "all weights, and use the object store for the first version in a format and for versions that are sent again. "
        "`ipc` has run on an H200, in whole runs; `nccl` on CPUs alone, over gloo.",
    )
    timeout_s: float = Field(120.0, gt=0)
    """Deadline for every engine to load and verify one weight version, in seconds."""
    delta: bool | Literal["auto"] = "auto"
    """Send only what changed since the version that the engines hold, and all weights to engines that hold another
    version. false always sends all; `auto` sends changes if the cluster has several nodes: on one, making deltas takes
    longer than copying the weights."""
    unquantized: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format in which embeddings, norms and other tensors without codes travel, and in which engines then
    compute with them: `float32` (32 bits); `bfloat16` or `float16` (16 bits); `auto` is that of the engines'
    `rollout.dtype`, but bfloat16 beside codes for float32 with precision_flow=rollout_only,
    unless learner.lora.base is codes."""
    bucket_mb: int = Field(32, ge=1)
    """Size of the buckets in which tensors travel, in MiB (2^20 bytes). It bounds what a sync holds in memory besides
    the weights."""
    probe_tokens: int | None = Field(None, ge=0)
    """Number of tokens, of all answers to a fixed prompt together, that every engine draws after a sync, to check that
    their log-probs are those of the learner's forward through the same codes; 0 skips this check. null is 8 for engines
    of one process in float32 on a CPU. Elsewhere rounding is noise that many tokens average out: 512, and 8192 on GPUs,
    where all of them are drawn side by side."""
    probe_every: int = Field(8, ge=1)
    """Number of syncs from one probe to the next. A version in another format, with other factors of equalization, for
    restarted engines, or sent again is always probed, and so are the first 16 unless their differences are 0. The
    weights themselves are verified at every sync."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest accepted mean difference between engine and learner of the probe's log-probs, in nats. The difference is
    0 with the torch engine on a CPU, and elsewhere depends on the engine's arithmetic; wrong weights are far above.
    null is 0.2 for engines of one process in float32 on a CPU, and 1 elsewhere. Below it, a difference that grows
    against what is usual for the engine, its number format and hardware has the weights sent again, and is reported if
    that does not help."""

    @field_validator("transport")
    @classmethod
    def _transport_is_known(cls, transport: str) -> str:
        return TRANSPORTS.check(transport)
