"""Sender's side of vLLM's own weight transfer: `nccl`, `sparse_nccl` and `ipc`, from GPU to GPU.

These engines transfer floats under the checkpoint's names. Codes are sent as bfloat16, which represents every code
exactly, and their scales with the manifest. So nothing is rounded a second time, whatever the precision in which an
engine computes. Few changed codes are few changed floats; changed parameters would be many. Not measured on a GPU.

This module imports vllm, so it is imported only where one of these transports is configured.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from qurl_ray.quant.quantize import quantize
from qurl_ray.sync.delta import Delta, Payload, decode_delta
from qurl_ray.sync.publish import Bucket, Publisher, Unquantized
from qurl_ray.sync.transport import Link, Probes
from qurl_ray.types import TensorRecord

Parameters = Callable[[], Iterable[tuple[str, torch.Tensor]]]
_CODE_BYTES, _INDEX_BYTES = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of a version, in the form in which it is sent."""

    records: tuple[TensorRecord, ...]
    scales: dict[str, np.ndarray]
    """Scales (float32) of every tensor of codes, by name. They travel with the manifest."""
    patches: tuple[SparseWeightPatch, ...]
    """Changed values of the tensors, for `sparse_nccl`; else empty."""


class Transfer:
    """Transport over one of vLLM's trainer engines, which is opened when the first version is sent; see
    sync.transport.Transport. All ranks call `send` together, because gathering a sharded learner's parameters is
    collective; only rank 0 sends.
    """

    def __init__(self, link: Link) -> None:
        self.sends_changes = link.name == "sparse_nccl"
        self._link, self._publisher = link, link.publisher
        self._source = _Floats(link.publisher, link.parameters)
        self._shard: Shard | None = None
        self._engine: Any = None
        self._broken = False

    def announce(self, buckets: Iterable[Bucket], fmt: Format | None, unquantized: Unquantized) -> None:
        """Have the engines prepare for the version.

        Raises:
            SyncError: an earlier transfer failed.
        """
        if self._broken:
            raise SyncError(
                f"vLLM's {self._link.name} transfer failed before, and its process group cannot be used again"
            )
        self._source.fmt, self._source.unquantized = fmt, getattr(torch, unquantized)
        self._shard = self._in_floats(list(buckets), fmt)
        self._link.expect(self._shard.records, self._shard.scales)

    def send(self) -> None:
        """Send the changed values, or all parameters. When this returns, the engines hold them, not yet verified.

        Raises:
            SyncError: vLLM failed on either side.
            DeadlineExceeded: the transfer took longer than the link's `timeout_s`.
        """
        assert self._shard, "announced"
        shard = self._shard
        self._within(lambda: self._send(shard))

    def verify(self) -> Probes:
        assert self._shard, "announced"
        probes, self._shard = self._link.verify(self._shard.records, None), None
        return probes

    def abort(self) -> None:
        """Refuse to send again: the process group of a failed transfer cannot be used any more."""
        self._shard, self._broken = None, True

    @staticmethod
    def receive(ticket: Any) -> Sequence[Payload]:
        raise SyncError("vLLM's own transfers have no tickets: the engines receive the weights themselves")

    def _in_floats(self, buckets: Sequence[Bucket], fmt: Format | None) -> Shard:
        """Convert the buckets that the publisher prepared to the form in which this transport sends them."""
        sent = [item for bucket in buckets for item in zip(bucket.records, bucket.payloads, strict=True)]
        wholes = {payload.name: payload for bucket in self._publisher.resend() for payload in bucket.payloads}
        scales = {name: whole.arrays[1].view(np.float32) for name, whole in wholes.items() if len(whole.parts) == 2}
        found = [_patch(payload, wholes[payload.name], fmt) for _, payload in sent] if self.sends_changes else []
        patches = {patch.name: patch for patch in found if len(patch.indices)}
        records = []
        for record, payload in sent:
            carried = _CODE_BYTES * payload.parts[0].size if record.name in scales else payload.bytes
            if self.sends_changes:
                patch = patches.get(record.name)
                carried = len(patch.indices) * (_INDEX_BYTES + patch.values.itemsize) if patch else 0
            beside = scales[record.name].nbytes if record.name in scales else 0
            records.append(replace(record, bytes=carried + beside))
        return Shard(records=tuple(records), scales=scales, patches=tuple(patches.values()))

    def _send(self, shard: Shard) -> None:
        self._engine = self._engine or self._opened()
        if self.sends_changes:
            device = self._engine.model_update_group.device
            moved = [replace(p, indices=p.indices.to(device), values=p.values.to(device)) for p in shard.patches]
            self._engine.send_weights(moved)
        else:
            self._engine.send_weights()

    def _opened(self) -> Any:
        rank = self._publisher.rank
        packed = {"packed": True, "packed_buffer_size_bytes": max(self._publisher.bucket_bytes, self._source.largest())}
        processes = self._link.engines * self._link.processes
        rendezvous = {"master_address": get_ip(), "master_port": get_open_port(), "world_size": 1 + processes}
        info = {
            "nccl": lambda: NCCLTrainerInitInfo(rank=rank, **rendezvous, **packed),
            "sparse_nccl": lambda: SparseNCCLTrainerInitInfo(rank=rank, **rendezvous),
            "ipc": lambda: IPCTrainerInitInfo(rank=rank, **packed),
        }[self._link.name]()
        source = None if self.sends_changes else self._source
        return WeightTransferTrainerFactory.trainer_init(info, client=_client(self._link), source=source)

    def _within(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread that can be abandoned: a collective whose other side is gone does not return."""
        done: Future[None] = Future()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # a setting per thread
                work()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, name="transfer", daemon=True).start()
        try:
            done.result(self._link.timeout_s)
        except QurlError:
            raise
        except TimeoutError:
            waited = f"waited {self._link.timeout_s:g} s for vLLM's {self._link.name} transfer"
            raise DeadlineExceeded(waited) from None
        except Exception as error:  # vLLM raises many kinds
            raise SyncError(f"vLLM's {self._link.name} transfer failed: {type(error).__name__}: {error}") from error


class _Floats(WeightSource):
    """Learner's parameters as they travel: codes as bfloat16, the rest as `unquantized`."""

    def __init__(self, publisher: Publisher, parameters: Parameters) -> None:
        self._publisher, self._parameters = publisher, parameters
        self._shapes: list[tuple[str, tuple[int, ...]]] = []
        self.fmt: Format | None = None
        self.unquantized = torch.float32

    def metadata(self) -> list[ParamMeta]:
        if not self._shapes:  # gathers all parameters, so done once
            self._shapes = [(name, tuple(parameter.shape)) for name, parameter in self._parameters()]
        dtypes = {True: torch.bfloat16, False: self.unquantized}
        return [ParamMeta(name, dtypes[self._coded(name)], shape) for name, shape in self._shapes]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters():
            if self.fmt and self._coded(name):
                codes = quantize(parameter.detach(), self.fmt).codes
                yield name, codes.to(torch.bfloat16)
            else:
                yield name, parameter.detach().to(self.unquantized)

    def largest(self) -> int:
        """Return the bytes of the largest tensor, in the largest form that it may take."""
        return max(4 * int(np.prod(meta.shape)) for meta in self.metadata())

    def _coded(self, name: str) -> bool:
        return self.fmt is not None and name in self._publisher.quantized


def _client(link: Link) -> SimpleNamespace:
    """Interface to the engines that vLLM's trainer engines need (its VLLMWeightSyncClient)."""

    def call(method: str, arguments: dict) -> None:
        link.call(method, [arguments] * link.engines)

    def start(info: dict) -> None:
        # vLLM numbers the processes of one engine only: the engines get consecutive rank offsets, after the sender.
        each = [dict(info) for _ in range(link.engines)]
        if "rank_offset" in info:
            each = [own | {"rank_offset": 1 + index * link.processes} for index, own in enumerate(each)]
        link.call("init_weight_transfer_engine", [{"init_info": own} for own in each])

    return SimpleNamespace(
        init_weight_transfer_engine=start,
        start_weight_update=lambda: call("start_weight_update", {}),
        update_weights=lambda info: call("update_weights", {"update_info": info}),
        finish_weight_update=lambda: call("finish_weight_update", {}),
    )


def _patch(payload: Payload, whole: Payload, fmt: Format | None) -> SparseWeightPatch:
    """New values of a tensor where it changed, or all values if it was not prepared as a delta."""
    part, bits = payload.parts[0], whole.arrays[0].reshape(-1)
    if isinstance(part, Delta):
        at = np.flatnonzero(
            decode_delta(np.zeros_like(bits), part)
        )  # added to zeros, it gives the change of each element
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
