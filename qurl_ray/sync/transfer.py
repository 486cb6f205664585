"""The sender's side of vLLM's own weight transfer: `nccl`, `sparse_nccl` and `ipc`, from GPU to GPU.

These engines carry floats under the checkpoint's names. Codes go as bfloat16, which holds every one of them, and their
scales with the manifest: nothing is rounded a second time, in whatever precision an engine computes, and few changed
codes are few changed floats, which changed parameters are not. Not measured on a GPU.

vllm is imported with this module, so only where one of these is configured.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerInitInfo, SparseWeightPatch
from vllm.utils.network_utils import get_ip, get_open_port

from qurl_ray.errors import DeadlineExceeded, QurlError, SyncError
from qurl_ray.quant.formats import Format
from qurl_ray.sync.delta import Delta, Payload, decode
from qurl_ray.sync.publish import Bucket, Publisher, Unquantized
from qurl_ray.types import TensorRecord

Parameters = Callable[[], Iterable[tuple[str, torch.Tensor]]]
_CODE_BYTES, _INDEX_BYTES = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One rank's part of a version."""

    records: tuple[TensorRecord, ...]
    scales: dict[str, np.ndarray]
    """float32, of every tensor of codes: what travels with the manifest."""
    patches: tuple[SparseWeightPatch, ...]
    """Of `sparse_nccl`: what changed."""


class Transfer:
    """One of vLLM's trainer engines, opened with the first version that it sends. Every rank has one and calls `send`
    with the others, as a sharded learner's parameters are gathered by all; rank 0 is the one that sends.

    Args:
        call: (method of vLLM's workers, its arguments), to all workers of all engines; returns when all are done.
        workers: of all engines together.
        parameters: of the learner, in the same order every time.
    """

    def __init__(
        self,
        transport: str,
        publisher: Publisher,
        parameters: Parameters,
        call: Callable[[str, dict], None],
        *,
        workers: int,
        timeout_s: float,
    ) -> None:
        self.sparse = transport == "sparse_nccl"
        self._transport, self._publisher, self._timeout_s = transport, publisher, timeout_s
        self._client, self._workers = _client(call), workers
        self._source = _Floats(publisher, parameters)
        self._engine: Any = None

    def parcel(self, buckets: Iterable[Bucket], fmt: Format | None) -> Parcel:
        """What the publisher prepared, as it travels here."""
        sent = [item for bucket in buckets for item in zip(bucket.records, bucket.payloads, strict=True)]
        wholes = {payload.name: payload for bucket in self._publisher.resend() for payload in bucket.payloads}
        scales = {name: whole.arrays[1].view(np.float32) for name, whole in wholes.items() if len(whole.parts) == 2}
        found = [_patch(payload, wholes[payload.name], fmt) for _, payload in sent] if self.sparse else []
        patches = {patch.name: patch for patch in found if len(patch.indices)}
        records = []
        for record, payload in sent:
            carried = _CODE_BYTES * payload.parts[0].size if record.name in scales else payload.bytes
            if self.sparse:
                patch = patches.get(record.name)
                carried = len(patch.indices) * (_INDEX_BYTES + patch.values.itemsize) if patch else 0
            beside = scales[record.name].nbytes if record.name in scales else 0
            records.append(replace(record, bytes=carried + beside))
        return Parcel(records=tuple(records), scales=scales, patches=tuple(patches.values()))

    def send(self, parcel: Parcel, fmt: Format | None, unquantized: Unquantized) -> None:
        """Bring the engines, which expect the version, what changed or all parameters. They have loaded it, and not yet
        verified, when this returns.

        Raises:
            SyncError: vLLM failed on either side. Its group is of no further use then.
            DeadlineExceeded: it was not done in time.
        """
        self._source.fmt, self._source.unquantized = fmt, getattr(torch, unquantized)
        self._within(lambda: self._send(parcel))

    def _send(self, parcel: Parcel) -> None:
        self._engine = self._engine or self._opened()
        if self.sparse:
            device = self._engine.model_update_group.device
            moved = [replace(p, indices=p.indices.to(device), values=p.values.to(device)) for p in parcel.patches]
            self._engine.send_weights(moved)
        else:
            self._engine.send_weights()

    def _opened(self) -> Any:
        rank = self._publisher.rank
        packed = {"packed": True, "packed_buffer_size_bytes": max(self._publisher.bucket_bytes, self._source.largest())}
        meeting = {"master_address": get_ip(), "master_port": get_open_port(), "world_size": 1 + self._workers}
        info = {
            "nccl": lambda: NCCLTrainerInitInfo(rank=rank, **meeting, **packed),
            "sparse_nccl": lambda: SparseNCCLTrainerInitInfo(rank=rank, **meeting),
            "ipc": lambda: IPCTrainerInitInfo(rank=rank, **packed),
        }[self._transport]()
        source = None if self.sparse else self._source
        return WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=source)

    def _within(self, work: Callable[[], None]) -> None:
        """Do it in a thread that can be left behind: a collective whose other side is gone does not return."""
        done: Future[None] = Future()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # a setting of each thread
                work()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, name="transfer", daemon=True).start()
        try:
            done.result(self._timeout_s)
        except QurlError:
            raise
        except TimeoutError:
            raise DeadlineExceeded(f"waited {self._timeout_s:g} s for vLLM's {self._transport} transfer") from None
        except Exception as error:  # vLLM's own kinds are many
            raise SyncError(f"vLLM's {self._transport} transfer failed: {type(error).__name__}: {error}") from error


class _Floats(WeightSource):
    """The learner's parameters as they travel: codes as bfloat16, the rest as `unquantized`."""

    def __init__(self, publisher: Publisher, parameters: Parameters) -> None:
        self._publisher, self._parameters = publisher, parameters
        self._shapes: list[tuple[str, tuple[int, ...]]] = []
        self.fmt: Format | None = None
        self.unquantized = torch.float32

    def metadata(self) -> list[ParamMeta]:
        if not self._shapes:  # gathers, so once
            self._shapes = [(name, tuple(parameter.shape)) for name, parameter in self._parameters()]
        dtypes = {True: torch.bfloat16, False: self.unquantized}
        return [ParamMeta(name, dtypes[self._coded(name)], shape) for name, shape in self._shapes]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters():
            if self.fmt and self._coded(name):
                codes = self._publisher.quantizer(name, parameter.detach(), self.fmt).codes
                yield name, codes.to(torch.bfloat16)
            else:
                yield name, parameter.detach().to(self.unquantized)

    def largest(self) -> int:
        """Bytes of the largest tensor in any form that it may take."""
        return max(4 * int(np.prod(meta.shape)) for meta in self.metadata())

    def _coded(self, name: str) -> bool:
        return self.fmt is not None and name in self._publisher.quantized


def _client(call: Callable[[str, dict], None]) -> SimpleNamespace:
    """What vLLM's trainer engines ask of the engines (its VLLMWeightSyncClient)."""
    return SimpleNamespace(
        init_weight_transfer_engine=lambda info: call("init_weight_transfer_engine", {"init_info": info}),
        start_weight_update=lambda: call("start_weight_update", {}),
        update_weights=lambda info: call("update_weights", {"update_info": info}),
        finish_weight_update=lambda: call("finish_weight_update", {}),
    )


def _patch(payload: Payload, whole: Payload, fmt: Format | None) -> SparseWeightPatch:
    """A tensor's new values where they changed; everywhere if it is not a delta that was prepared."""
    part, bits = payload.parts[0], whole.arrays[0].reshape(-1)
    if isinstance(part, Delta):
        at = np.flatnonzero(decode(np.zeros_like(bits), part))  # added to zeros: how far each element moved
    else:
        at = np.arange(bits.size)
    kinds: dict[str, Any] = {"codes": fmt.dtype if fmt else None, "bfloat16": torch.bfloat16, "float32": torch.float32}
    values = torch.from_numpy(bits[at].view(f"i{bits.itemsize}")).view(kinds[whole.encoding])
    return SparseWeightPatch(
        name=payload.name,
        indices=torch.from_numpy(at.astype(np.int32)),
        values=values.to(torch.bfloat16) if whole.encoding == "codes" else values,
        full_shape=whole.arrays[0].shape,
    )
