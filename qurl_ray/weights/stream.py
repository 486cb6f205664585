"""Sender's side of a weight sync. Tensor i belongs to rank i mod W, which quantizes, fingerprints and sends it, so no
rank holds all codes.

Tensors are sent in buckets of limited size, so that a sender holds one copy of what it sent and one bucket. The next
version is compared with that copy: only the changes have to travel.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from qurl_ray.errors import SyncError
from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import Format
from qurl_ray.quant.quantize import QTensor, quantize
from qurl_ray.quant.units import Unit
from qurl_ray.types import Manifest, TensorRecord
from qurl_ray.weights.delta import Encoding, Payload, encode_delta

Unquantized = Literal["float32", "bfloat16", "float16"]
"""Encoding in which tensors outside the quantized set travel; engines hold them as float32 either way."""
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Some of a rank's tensors of one version: their records for the manifest and their payloads for the engines."""

    records: tuple[TensorRecord, ...]
    payloads: tuple[Payload, ...]

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.records)


@dataclass
class Publisher:
    """Publisher of one rank: turns its parameters into buckets of a version, and remembers what it sent.

    Example:
        for bucket in publisher.prepare(model.named_parameters(), fmt, version=8, base_version=7):
            refs.append(ray.put(bucket.payloads))
            records += bucket.records
    """

    quantized: Mapping[str, Unit]
    """Units that are sent as codes, by the names of their parameters."""
    rank: int = 0
    ranks: int = 1
    bucket_bytes: int = 1 << 26
    """Largest bucket, in bytes of its tensors as they are sent whole; a larger tensor is a bucket of its own."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that are sent, if they are in `quantized`, as codes of another parameter and in addition to it, by the rank
    of that parameter: {"lm_head.weight": "model.embed_tokens.weight"}."""
    exact: Set[str] = frozenset()
    """Names of parameters that are sent in float32, however the others without codes are: weights of routers."""
    _sent: dict[str, tuple[TensorRecord, Payload]] = field(default_factory=dict)
    """Records and whole payloads of the version sent last, by name, also of the tensors that a subset left out.
    Payloads that were sent whole share their arrays."""
    _form: tuple[Format | None, Unquantized] | None = None
    _owner: dict[str, int] = field(default_factory=dict)
    """Rank that sends each tensor."""
    _version: int | None = None
    """Version sent last; None before the first, while a version is prepared, and if one was not prepared to its end."""

    def prepare(
        self,
        parameters: Iterable[tuple[str, torch.Tensor | QTensor]],
        fmt: Format | None,
        *,
        version: int,
        base_version: int | None = None,
        unquantized: Unquantized = "float32",
        complete: bool = True,
    ) -> Iterator[Bucket]:
        """Quantize this rank's tensors (none if `fmt` is None) and yield them, bucket by bucket. A tensor that is
        quantized already is sent as it is. Only a version that was iterated to its end can be resent or be the next
        one's base.

        Args:
            base_version: version that the engines hold. Deltas are made if it is the version sent last, in the same
                format and encoding, and each only where it is smaller than the tensor; None sends all tensors whole.
            complete: False if `parameters` are some of those that the version sent last has, in the same form. The
                others are part of this version, too, and are sent with it if it is resent.

        Raises:
            QuantizationError: a weight is not finite or does not fit the format.
            SyncError: a subset follows no version of its form, or has a tensor that this version does not have.
        """
        form = (fmt, unquantized)
        if not complete and (form != self._form or self._version is None):
            raise SyncError(f"version {version} is a subset, and no complete version was sent in its form")
        last = self._sent if form == self._form else {}
        base = base_version if last and base_version == self._version else None
        self._sent, self._form, self._version = {} if complete else dict(last), form, None
        yield from self._buckets(self._messages(parameters, fmt, unquantized, last, base, complete))
        self._version = version

    def resend(self) -> Iterator[Bucket]:
        """Yield the version sent last again, whole, from memory: for engines that failed to verify it.

        Raises:
            SyncError: no version was prepared to its end.
        """
        if self._version is None:
            raise SyncError("nothing to resend: no version was prepared to its end")
        yield from self._buckets(self._sent.values())

    def _messages(
        self,
        parameters: Iterable[tuple[str, torch.Tensor | QTensor]],
        fmt: Format | None,
        unquantized: Unquantized,
        last: dict[str, tuple[TensorRecord, Payload]],
        base: int | None,
        complete: bool,
    ) -> Iterator[tuple[TensorRecord, Payload]]:
        """Yield record and payload of each of this rank's tensors, followed by those tied to it. `last` is consumed on
        the way, so that only one copy of each tensor exists."""
        for index, (source, parameter) in enumerate(parameters):
            if complete:
                self._owner[source] = index % self.ranks
            elif source not in self._owner:
                raise SyncError(f"{source} is not among the tensors of the version before")
            if self._owner[source] != self.rank:
                continue
            for name in [source, *(other for other, origin in self.tied.items() if origin == source)]:
                tied = name != source
                codes = fmt if name in self.quantized else None
                if tied and not codes:
                    continue
                tensor = parameter
                if codes and not isinstance(tensor, QTensor):
                    tensor = quantize(tensor, codes)
                record, whole = _whole(name, tensor, "float32" if name in self.exact else unquantized)
                _, before = last.pop(name, (None, None))
                record, payload = _compared(replace(record, tied=tied), whole, before, base)
                self._sent[name] = replace(record, bytes=whole.bytes, base_version=None), whole
                yield record, payload

    def _buckets(self, messages: Iterable[tuple[TensorRecord, Payload]]) -> Iterator[Bucket]:
        """Group messages, in their order, into buckets."""
        held: list[tuple[TensorRecord, Payload]] = []
        size = 0
        for record, payload in messages:
            whole = self._sent[record.name][1].bytes
            if held and size + whole > self.bucket_bytes:
                yield _bucket(held)
                held, size = [], 0
            held.append((record, payload))
            size += whole
        if held:
            yield _bucket(held)


def assemble_manifest(
    version: int, fmt: Format | None, parts: Sequence[tuple[TensorRecord, ...]], *, subset_of: int | None = None
) -> Manifest:
    """Return the manifest of a version, from the records of all ranks and buckets.

    Args:
        subset_of: version that has the other tensors; None if the records are all.

    Raises:
        SyncError: a tensor was sent twice, or ranks made deltas to different versions.
    """
    tensors = tuple(record for records in parts for record in records)
    if len({record.name for record in tensors}) != len(tensors):
        raise SyncError(f"version {version}: a tensor was sent twice")
    bases = {base for base in (subset_of, *(record.base_version for record in tensors)) if base is not None}
    if len(bases) > 1:
        raise SyncError(f"version {version}: deltas to different versions, {sorted(bases)}")
    return Manifest(
        version=version,
        precision=fmt.name if fmt else "none",
        weight_max_code=fmt.weight_max if fmt else 0,
        tensors=tensors,
        base_version=next(iter(bases), None),
        complete=subset_of is None,
    )


def count_codes(records: Iterable[TensorRecord]) -> tuple[Counter[str], Counter[str]]:
    """Return the numbers of codes and of changed codes, each by the kind of their linear: q_proj, up_proj, …"""
    codes: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for record in records:
        if record.format != "none":
            kind = record.name.split(".")[-2]
            codes[kind] += math.prod(record.shape)
            changed[kind] += record.changed
    return codes, changed


def _whole(name: str, tensor: torch.Tensor | QTensor, unquantized: Unquantized) -> tuple[TensorRecord, Payload]:
    """Return record and payload of one whole encoded tensor, with the fingerprint of its decoded values."""
    held: tuple[torch.Tensor, ...]
    sent: tuple[torch.Tensor, ...]
    encoding: Encoding
    if isinstance(tensor, QTensor):
        held, sent = tensor.parts, tuple(part.cpu() for part in tensor.parts)
        encoding, form = "codes", tensor.fmt.name
    else:
        # A copy, because the parameter goes on changing. Rounded to nearest, ties to even.
        sent = (tensor.detach().to("cpu", getattr(torch, unquantized), copy=True),)
        beyond = sent[0].isinf() if unquantized == "float16" else torch.zeros(0)
        if bool(beyond.any()) and bool((beyond & tensor.detach().cpu().isfinite()).any()):
            raise SyncError(f"{name} has values beyond 65504, which float16 does not hold: take bfloat16 or float32")
        held, encoding, form = (sent[0].float(),), unquantized, "none"
    payload = Payload(name=name, encoding=encoding, parts=tuple(map(_bits, sent)))
    record = TensorRecord(
        name=name,
        shape=tuple(tensor.shape),
        format=form,
        fingerprint=fingerprint(*held),
        bytes=payload.bytes,
    )
    return record, payload


def _compared(
    record: TensorRecord, whole: Payload, before: Payload | None, base: int | None
) -> tuple[TensorRecord, Payload]:
    """Return record and payload with each array replaced by its delta to the version sent before, if the engines hold
    that version and the delta is smaller."""
    if before is None or before.encoding != whole.encoding or before.arrays[0].shape != whole.arrays[0].shape:
        return record, whole
    deltas = tuple(map(encode_delta, before.arrays, whole.arrays)) if base is not None else (None,)
    if record.format != "none":  # only codes report how many changed
        changed = deltas[0].count if deltas[0] else int(np.count_nonzero(before.arrays[0] != whole.arrays[0]))
        record = replace(record, changed=changed)
    if not any(deltas):
        return record, whole
    parts = tuple(delta or part for delta, part in zip(deltas, whole.parts, strict=True))
    payload = replace(whole, parts=parts, base_version=base)
    return replace(record, bytes=payload.bytes, base_version=base), payload


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """Return a view of the same memory as unsigned integers of the same size."""
    size = tensor.element_size()
    return tensor.contiguous().view(_SIGNED[size]).numpy().view(f"u{size}")


def _bucket(messages: Sequence[tuple[TensorRecord, Payload]]) -> Bucket:
    records, payloads = zip(*messages, strict=True)
    return Bucket(records=records, payloads=payloads)
