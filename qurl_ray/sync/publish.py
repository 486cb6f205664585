"""The sender's side of a sync. Tensor i belongs to rank i mod W: that rank quantizes, fingerprints and sends it, so no
rank holds all codes."""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch

from qurl_ray.errors import SyncError
from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import Format
from qurl_ray.quant.quantize import QTensor, quantize
from qurl_ray.types import Manifest, TensorRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's tensors of one version."""

    records: tuple[TensorRecord, ...]
    buffers: dict[str, tuple[np.ndarray, ...]]
    codes: Counter[str]
    """Weight codes in this part, by the kind of their linear: q_proj, up_proj, …"""
    codes_changed: Counter[str]
    """Of these, how many differ from the version sent before; 0 if there was none in this format."""

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.records)


@dataclass
class Publisher:
    """Turns parameters into a rank's part of a version, and remembers its codes to count what changed."""

    quantized: Set[str]
    """Names of the parameters that become codes."""
    rank: int = 0
    ranks: int = 1
    _last: dict[str, np.ndarray] = field(default_factory=dict)
    _last_format: str = ""

    def prepare(self, parameters: Iterable[tuple[str, torch.Tensor | QTensor]], fmt: Format | None) -> Part:
        """Quantize (fmt None: copy) this rank's tensors. One that is quantized already is sent as it is.

        Raises:
            QuantizationError: a weight is not finite or does not fit the format.
        """
        records, buffers, codes, changed = [], {}, Counter(), Counter()
        if fmt and fmt.name != self._last_format:
            self._last, self._last_format = {}, fmt.name
        for index, (name, parameter) in enumerate(parameters):
            if index % self.ranks != self.rank:
                continue
            if isinstance(parameter, QTensor) or (fmt and name in self.quantized):
                q = parameter if isinstance(parameter, QTensor) else quantize(parameter, fmt).cpu()
                tensors = (q.codes, q.scale)
                buffers[name] = q.to_numpy()
                last, kind = self._last.get(name), name.split(".")[-2]
                changed[kind] += int(np.count_nonzero(buffers[name][0] != last)) if last is not None else 0
                codes[kind] += q.codes.numel()
                self._last[name] = buffers[name][0]
            else:
                tensors = (parameter.detach().to("cpu", torch.float32, copy=True),)
                buffers[name] = (tensors[0].numpy(),)
            records.append(
                TensorRecord(
                    name=name,
                    shape=tuple(parameter.shape),
                    format=fmt.name if len(tensors) == 2 else "none",
                    fingerprint=fingerprint(*tensors),
                    bytes=sum(tensor.nbytes for tensor in tensors),
                )
            )
        return Part(records=tuple(records), buffers=buffers, codes=codes, codes_changed=changed)


def assemble(version: int, fmt: Format | None, parts: Sequence[tuple[TensorRecord, ...]]) -> Manifest:
    """The manifest of a version from the records of all ranks.

    Raises:
        SyncError: two ranks sent the same tensor.
    """
    tensors = tuple(record for records in parts for record in records)
    if len({record.name for record in tensors}) != len(tensors):
        raise SyncError(f"version {version}: a tensor was sent twice")
    return Manifest(
        version=version,
        precision=fmt.name if fmt else "none",
        weight_max_code=fmt.weight_max if fmt else 0,
        tensors=tensors,
    )
