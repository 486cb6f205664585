"""Direct transports, from the devices of the learner's ranks to those of the engines. The host carries no weights.

    rank:     quantize on its device ─► bucket ─► the other bucket ─► …
    engine:                               ╰─► copy into place ─► …    ─► fingerprints, compared with the manifest

`ipc`: every rank hands its buckets to the engine that computes on the same GPU, as memory that this engine opens. All
ranks fill theirs alike, because a sharded learner gathers every parameter on all ranks. On a CPU, the memory is a
mapped file. `nccl`: rank 0 broadcasts its buckets to all processes of the engines; on a CPU, over gloo.

Each rank also keeps its own part on the host, for engines that must get the version
again, through the object store: those that failed, restarted or joined. `ipc` has run on an H200, `nccl` on CPUs alone.
"""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from qurl_ray.errors import QurlError, SyncError
from qurl_ray.quant.formats import Format
from qurl_ray.quant.quantize import QTensor, quantize
from qurl_ray.transfer.group import Meeting, broadcast, join, lead, within
from qurl_ray.transfer.shared_memory import Placed, SharedBuffer, aligned, gpu_handle, uuid_of
from qurl_ray.types import StagedBucket, TensorRecord
from qurl_ray.weights.stream import Bucket, Unquantized
from qurl_ray.weights.transports.protocol import Link, Probes, Transport


class Direct(Transport):
    """A rank's side; see transports.protocol.Transport. The parameters that a version is made of must pass through
    `staged`: it is what sends them. `put` only collects the records of this rank's share.

    A transfer that fails is no error here: `commit` reports it, and all ranks send the version again.
    """

    sends_changes = False

    def __init__(self, link: Link) -> None:
        self._link = link
        self._records: list[TensorRecord] = []
        self._taken: Callable[[], None] = lambda: None
        """Waits until the engines have taken the bucket that was sent last."""
        self._failed: str | None = None
        self._number = self._filled = 0
        self._held: dict[int, torch.Tensor] = {}
        self._items: list[tuple[str, str, tuple[Placed, ...]]] = []

    def staged(
        self, parameters: Iterable[tuple[str, torch.Tensor]], fmt: Format | None, unquantized: Unquantized
    ) -> Iterator[tuple[str, torch.Tensor | QTensor]]:
        """Yield the parameters, those of the quantized set as codes, and send them on their way. Collective if the
        parameters are sharded."""
        for name, parameter in parameters:
            quantized = fmt if name in self._link.publisher.quantized else None
            value = quantize(parameter.detach(), quantized) if quantized else parameter.detach()
            if self._sends:
                self._unless_failed(partial(self._stage, name, value, getattr(torch, unquantized)))
            yield name, value

    def begin(self) -> None:
        self._failed, self._number, self._filled = None, 0, 0
        self._items.clear()
        self._records = []
        self._taken = lambda: None
        self._expect(self._link.begin())

    def put(self, bucket: Bucket) -> None:
        self._records += bucket.records

    def commit(self) -> Probes:
        if self._sends:
            self._unless_failed(self._hand_over)
            self._unless_failed(self._taken)
        probes = self._link.commit(self._records, failed=self._failed)
        self.abort()
        return probes

    def abort(self) -> None:
        self._records = []

    @staticmethod
    def receive(ticket: Any) -> Sequence[Any]:
        raise SyncError("direct transports have no tickets: the engines receive the weights themselves")

    # --- buckets ---------------------------------------------------------------------------------------------------

    def _stage(self, name: str, value: torch.Tensor | QTensor, dtype: torch.dtype) -> None:
        """Copy a tensor to the bucket, which is sent first if it is full."""
        parts = value.parts if isinstance(value, QTensor) else (value.to(dtype),)
        size = sum(aligned(part.nbytes) for part in parts)
        if self._items and self._filled + size > self._link.publisher.bucket_bytes:
            self._hand_over()
        memory = self._held.get(self._number % 2)
        if memory is None or len(memory) < self._filled + size:
            capacity = max(self._filled + size, self._link.publisher.bucket_bytes)
            memory = self._held[self._number % 2] = self._allocated(capacity, parts[0].device)
        places = []
        for part in parts:
            places.append((str(part.dtype).removeprefix("torch."), tuple(part.shape), self._filled))
            memory[self._filled : self._filled + part.nbytes].copy_(part.contiguous().reshape(-1).view(torch.uint8))
            self._filled += aligned(part.nbytes)
        self._items.append((name, value.fmt.name if isinstance(value, QTensor) else "none", tuple(places)))

    def _hand_over(self) -> None:
        """Send the bucket, unless it is empty; return when the engines have taken the one before."""
        if not self._items:
            return
        self._taken()
        memory = self._held[self._number % 2]
        if memory.is_cuda:
            torch.cuda.current_stream(memory.device).synchronize()  # copied, for other processes, too
        self._taken = self._link.put(
            StagedBucket(
                number=self._number,
                items=tuple(self._items),
                weight_max_code=self._link.header.weight_max_code or 0,
                size=self._filled,
                source=self._source(memory),
            )
        )
        self._deliver(memory[: self._filled])
        self._number, self._filled = self._number + 1, 0
        self._items.clear()

    def _unless_failed(self, work: Callable[[], None]) -> None:
        """Do the work, unless this version's transfer has failed. Remember if it fails now: gathering must go on, or
        other ranks would wait."""
        if self._failed is not None:
            return
        try:
            work()
        except QurlError as error:
            self._failed = f"{self._link.name}: {error}"

    # --- differences between the two ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _sends(self) -> bool:
        """This rank sends buckets."""

    def _expect(self, engines: Mapping[int, tuple[str, int]]) -> None:
        """Take note of the engines that take part, by index: their identity and number of processes."""

    def _allocated(self, size: int, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    @abstractmethod
    def _source(self, memory: torch.Tensor) -> dict[str, Any]:
        """Return where engines get the bytes of a bucket, in plain types."""

    def _deliver(self, memory: torch.Tensor) -> None:
        """Do this side's part, while the engines take the bucket."""


class SharedMemory(Direct):
    """`ipc`."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._files = SharedBuffer(), SharedBuffer()

    @property
    def _sends(self) -> bool:
        return True

    def _allocated(self, size: int, device: torch.device) -> torch.Tensor:
        if device.type == "cuda":
            return super()._allocated(size, device)
        return torch.from_numpy(self._files[self._number % 2].reserve(size))

    def _source(self, memory: torch.Tensor) -> dict[str, Any]:
        if memory.is_cuda:
            return {"memory": {uuid_of(memory.device): gpu_handle(memory)}}
        return {"memory": {f"rank {self._link.publisher.rank}": self._files[self._number % 2].address}}


class Broadcast(Direct):
    """`nccl`. The group is made again when an engine has joined or restarted, and after a failure."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._engines: Mapping[int, tuple[str, int]] = {}
        self._meeting: tuple[Any, Meeting] | None = None
        self._group: Any = None

    @property
    def _sends(self) -> bool:
        return self._link.publisher.rank == 0

    def _expect(self, engines: Mapping[int, tuple[str, int]]) -> None:
        if engines != self._engines:
            self._meeting = self._group = None
        self._engines = engines

    def _source(self, memory: torch.Tensor) -> dict[str, Any]:
        counts = [count for _, count in self._engines.values()]
        # Half of it: a worker whose group waits in vain is to say so before it is ended for being late.
        self._meeting = self._meeting or lead(self._link.host, 1 + sum(counts), self._link.timeout_s / 2)
        first = itertools.accumulate(counts, initial=1)
        return {"group": self._meeting[1], "first": dict(zip(self._engines, first, strict=False))}

    def _deliver(self, memory: torch.Tensor) -> None:
        assert self._meeting, "_source comes first"
        store, meeting = self._meeting

        def work() -> None:
            self._group = self._group or join(meeting, 0, memory.device, store)
            broadcast(self._group, memory)

        try:
            within(self._link.timeout_s, memory.device, "the broadcast of weights", work)
        except QurlError:
            self._meeting = self._group = None  # nothing can be sent through it again
            raise
