"""Seconds of a weight sync, by transport: what moves, and what hosts and GPUs compute for it.

object_store   each rank quantizes its share, copies it to the host, fingerprints it there and puts it into the store.
               Each engine fetches all of it and decodes it into memory shared with its workers, which copy it to the
               GPU and fingerprint it there
ipc            each rank quantizes every tensor on its GPU, for the engine there, which copies and fingerprints it; and
               copies its share to the host, for refits
nccl           the same, but rank 0 broadcasts what it quantized

With ZeRO-3, all ranks gather each tensor first. Ranks and engines work one after the other. Probes are left out. A
delta is smaller on the network alone: it costs the rank a comparison, and the engine a copy of what it is added to.
"""

from dataclasses import dataclass

from qurl_ray.planning.machines import CONSTANTS, HOST, NETWORK, NODE, Constants, Gpu, Host, Precision
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.workload import TransportName

_OPERATIONS = 30  # on the device, to quantize, move and fingerprint one tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Number of weights of a version, by the form in which they travel."""

    codes: int
    floats: int
    float_bytes: int
    """Bytes of each of the floats: 2 in bfloat16, 4 in float32."""
    tensors: int

    @property
    def bytes(self) -> int:
        """Bytes on the way: one for each code, without scales."""
        return self.codes + self.float_bytes * self.floats

    @property
    def decoded(self) -> int:
        """Bytes that engines get and both sides fingerprint: floats are float32 there."""
        return self.codes + 4 * self.floats


def sent_weights(shape: Shape, precision: Precision, float_bytes: int = 2) -> Sent:
    """Return what a version of this shape sends: the block linears as codes, if the format has codes."""
    codes = 0 if precision == "bf16" else shape.block_params
    return Sent(codes=codes, floats=shape.params - codes, float_bytes=float_bytes, tensors=9 * shape.layers + 3)


def delta_bytes(shape: Shape, c: Constants = CONSTANTS) -> float:
    """Bytes of the changes of one step."""
    return 2 * shape.params * c.delta


def cpu_sync_parts(sent: Sent, host: Host = HOST) -> dict[str, float]:
    """Seconds of each part of a sync through the object store of one rank and the torch engine, on a CPU."""
    rounds = sent.float_bytes == 2
    copied, widened = 4 * sent.floats / (host.convert if rounds else host.copy), _widened_s(sent, host)
    return {
        "quantize": 4 * sent.codes / host.quantize + copied,
        "fingerprint": widened + sent.decoded / host.fingerprint,
        "compare": sent.codes / host.compare,
        "put": sent.bytes / host.put,
        "decode": widened,
        "place": 4 * sent.floats / host.copy + sent.codes / host.pack / host.threads,
        "verify": sent.decoded / host.fingerprint / host.threads,
    }


def _widened_s(sent: Sent, host: Host) -> float:
    """Seconds to make float32 of what is sent in bfloat16, which ranks fingerprint and engines get."""
    return 4 * sent.floats / host.convert if sent.float_bytes == 2 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Ranks and GPUs between which weights travel."""

    transport: TransportName
    ranks: int
    gpus: int
    """GPUs of ranks and engines together."""
    gathered: bool
    """True with ZeRO-3 on several ranks: no rank holds whole parameters."""
    delta: bool = False
    """Send changes where the transport can: `object_store`."""
    bucket: int = 32 << 20
    """sync.bucket_mb, in bytes."""


def sync_parts(
    shape: Shape, gpu: Gpu, precision: Precision, route: Route, *, host: Host = HOST, c: Constants = CONSTANTS
) -> dict[str, float]:
    """Seconds of each part of a sync of ranks and vLLM engines on GPUs."""
    sent, through_host = sent_weights(shape, precision), route.transport == "object_store"
    line = (gpu.link if route.gpus <= NODE else NETWORK) * c.link
    share = 1 / route.ranks
    quantized = share if through_host else 1.0  # ipc and nccl: every tensor on each GPU
    device = gpu.bandwidth * c.bandwidth
    launches = sent.tensors * _OPERATIONS * c.launch_s
    parts = {
        "gather": 4 * shape.params * (1 - share) / line + sent.tensors * c.gather_s if route.gathered else 0.0,
        "quantize": quantized * ((4 * shape.params + sent.bytes) / device + launches),
        "copy to the host": share * sent.bytes / c.pageable,
        "compare": share * sent.codes / host.compare,
    }
    calls = -(-sent.bytes // route.bucket) * c.call_s
    if not through_host:
        moved = sent.bytes / line if route.transport == "nccl" else 2 * sent.bytes / device
        return parts | {"send": moved + calls, "fingerprint": 2 * sent.decoded / device + launches}
    parts["fingerprint"] = share * (_widened_s(sent, host) + sent.decoded / host.fingerprint)
    travels = delta_bytes(shape, c) if route.delta else sent.bytes
    parts["put"] = share * travels / host.put
    if route.delta:
        parts["put"] += share * (sent.bytes / host.compare + travels / host.changes)
    parts["network"] = travels / c.objects if route.gpus > NODE else 0.0
    base = sent.decoded / host.copy if route.delta else 0.0
    parts["decode"] = base + _widened_s(sent, host) + sent.decoded / host.copy
    parts["load"] = calls + sent.decoded / c.pageable
    parts["verify"] = sent.decoded / device + launches
    return parts


def sync_s(
    shape: Shape, gpu: Gpu, precision: Precision, route: Route, *, host: Host = HOST, c: Constants = CONSTANTS
) -> float:
    """Seconds of a sync; see sync_parts."""
    return sum(sync_parts(shape, gpu, precision, route, host=host, c=c).values())
