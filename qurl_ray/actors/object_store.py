"""The transport through Ray's object store: engines fetch buckets from it, one copy per node."""

from collections.abc import Iterable, Sequence

import ray
from ray import ObjectRef

from qurl_ray.quant.formats import Format
from qurl_ray.sync.delta import Payload
from qurl_ray.sync.publish import Bucket, Unquantized
from qurl_ray.sync.transport import Link, Probes
from qurl_ray.types import TensorRecord


class ObjectStore:
    """Transport of buckets as objects, which live until all engines have verified the version; see
    sync.transport.Transport."""

    sends_changes = True

    def __init__(self, link: Link) -> None:
        self._link = link
        self._buckets: Iterable[Bucket] = ()
        self._records: list[TensorRecord] = []
        self._objects: list[ObjectRef] = []

    def announce(self, buckets: Iterable[Bucket], fmt: Format | None, unquantized: Unquantized) -> None:
        self._buckets = buckets

    def send(self) -> None:
        for bucket in self._buckets:  # one at a time: they are made on demand
            self._objects.append(ray.put(bucket.payloads))
            self._records += bucket.records

    def verify(self) -> Probes:
        probes = self._link.verify(self._records, self._objects)
        self.abort()
        return probes

    def abort(self) -> None:
        self._buckets, self._records, self._objects = (), [], []

    @staticmethod
    def receive(ticket: ObjectRef) -> Sequence[Payload]:
        return ray.get(ticket)
