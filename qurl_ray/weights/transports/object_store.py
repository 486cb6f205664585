"""The transport through Ray's object store: engines fetch buckets from it, one copy per node."""

from collections.abc import Sequence

import ray
from ray import ObjectRef

from qurl_ray.types import TensorRecord
from qurl_ray.weights.delta import Payload
from qurl_ray.weights.messages import Probes
from qurl_ray.weights.stream import Bucket
from qurl_ray.weights.transports.protocol import Link


class ObjectStore:
    """Transport of buckets as objects, which live until all engines have verified the version; see
    transports.protocol.Transport."""

    sends_changes = True

    def __init__(self, link: Link) -> None:
        self._link = link
        self._records: list[TensorRecord] = []
        self._objects: list[ObjectRef] = []

    def begin(self) -> None:
        self._records, self._objects = [], []

    def put(self, bucket: Bucket) -> None:
        self._objects.append(ray.put(bucket.payloads))
        self._records += bucket.records

    def commit(self) -> Probes:
        probes = self._link.commit(self._records, self._objects)
        self.abort()
        return probes

    def abort(self) -> None:
        self._records, self._objects = [], []

    @staticmethod
    def receive(ticket: ObjectRef) -> Sequence[Payload]:
        return ray.get(ticket)
