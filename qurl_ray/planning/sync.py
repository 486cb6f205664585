"""Seconds of a weight sync, by transport: what moves, and what hosts and GPUs compute for it.

object_store   each rank quantizes its share, copies it to the host, fingerprints it there and puts it into the store.
               Each engine fetches all of it and decodes it into memory shared with its workers, which copy it to the
               GPU and fingerprint it there
ipc            each rank quantizes every tensor on its GPU, for the engine there, which copies and fingerprints it; and
               copies its share to the host, for refits
nccl           the same, but rank 0 broadcasts what it quantized

With ZeRO-3 and FSDP2, all ranks gather each tensor first. Ranks and engines work one after the other. Probes are left
out. A delta is smaller on the network alone: it costs the rank a comparison, and the engine a copy of what it is added
to.
"""

import math

from qurl_ray.planning.machines import BLOCK_BYTES, CONSTANTS, NETWORK, NODE, Constants, Precision
from qurl_ray.planning.memory import EngineSpec, Layout
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.workload import Workload

_OPERATIONS = 30  # on the device, to quantize, move and fingerprint one tensor


def sent_bytes(shape: Shape, precision: Precision, work: Workload) -> float:
    """Bytes of a version on the way: codes of the block linears, and the rest in bfloat16; of adapters, in float32 over
    codes that the learner has, too."""
    if work.lora_rank:
        return (4 if work.lora_codes else 2) * shape.adapter_params(work.lora_rank)
    return shape.weight_bytes(BLOCK_BYTES[precision])


def delta_bytes(shape: Shape, c: Constants = CONSTANTS) -> float:
    """Bytes of the changes of one step."""
    return 2 * shape.params * c.delta


def sync_parts(engine: EngineSpec, layout: Layout, work: Workload) -> dict[str, float]:
    """Seconds of each part of a sync of the ranks and engines of a layout, by `work.transport`."""
    shape, gpu, c = engine.shape, engine.gpu, engine.constants
    params, share = shape.adapter_params(work.lora_rank) if work.lora_rank else shape.params, 1 / layout.ranks
    codes = 0 if engine.precision == "bf16" or work.lora_rank else shape.block_params
    coded = codes * BLOCK_BYTES[engine.precision]  # bytes
    floats, tensors = params - codes, (14 if work.lora_rank else 9) * shape.layers + 3
    sent = sent_bytes(shape, engine.precision, work)
    decoded = coded + 4 * floats  # what engines get and both sides fingerprint: floats are float32 there
    through_host = work.transport == "object_store"
    line = (gpu.link if layout.gpus <= NODE else NETWORK) * c.link
    device = gpu.bandwidth * c.bandwidth
    launches = tensors * _OPERATIONS * c.launch_s
    calls = math.ceil(sent / work.bucket) * c.call_s

    gather = 4 * params * (1 - share) / line + tensors * c.gather_s
    gathered = layout.stage in (3, "fsdp") and layout.ranks > 1
    quantized = share if through_host else 1.0  # ipc and nccl: every tensor on each GPU
    parts = {
        "gather": gather if gathered else 0.0,
        "quantize": quantized * ((4 * params + sent) / device + launches),
        "copy to the host": share * sent / c.pageable,
        "compare": share * coded / c.compare,
    }
    if not through_host:
        moved = sent / line if work.transport == "nccl" else 2 * sent / device
        return parts | {"send": moved + calls, "fingerprint": 2 * decoded / device + launches}

    widened = 4 * floats / c.convert  # bfloat16 to float32, which ranks fingerprint and engines get
    delta = work.sends_changes(nodes=math.ceil(layout.gpus / NODE))
    travels = min(sent, delta_bytes(shape, c)) if delta else sent
    packed = share * (sent / c.compare + travels / c.changes) if delta else 0.0
    base = decoded / c.copy if delta else 0.0
    return parts | {
        "fingerprint": share * (widened + decoded / c.fingerprint),
        "put": share * travels / c.put + packed,
        "network": travels / c.objects if layout.gpus > NODE else 0.0,
        "decode": base + widened + decoded / c.copy,
        "load": calls + decoded / c.pageable,
        "verify": decoded / device + launches,
    }


def sync_s(engine: EngineSpec, layout: Layout, work: Workload) -> float:
    """Seconds of a sync; see sync_parts."""
    return sum(sync_parts(engine, layout, work).values())
