"""Keys and values of trajectories that wait for their environment, within a limit of bytes."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKeys:
    """Keys and values of the first tokens of a row, as its slot held them."""

    token_ids: np.ndarray  # int32 [n]
    keys: torch.Tensor
    """[layers, key heads, n, d]; values likewise."""
    values: torch.Tensor
    routes: np.ndarray | None = None
    """Experts of these tokens, if they are recorded (AnswerTokens.routes)."""

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class KeysPool:
    """Keys and values by uid of their request. The oldest are dropped where there is no room: their tokens are then
    computed again, with the same bits.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._kept: OrderedDict[str, KeptKeys] = OrderedDict()

    def has_room(self, size: int) -> bool:
        """Return True if keys and values of `size` bytes can be kept."""
        return size <= self._limit

    def put(self, uid: str, kept: KeptKeys) -> None:
        """Keep these keys and values, if they fit."""
        self._drop(uid)
        if not self.has_room(kept.bytes):
            return
        while self._held + kept.bytes > self._limit:
            self._drop(next(iter(self._kept)))
        self._kept[uid] = kept
        self._held += kept.bytes

    def take(self, uid: str, token_ids: np.ndarray) -> KeptKeys | None:
        """Return and forget the keys and values of this row, if the row begins with it and is longer."""
        kept = self._drop(uid)
        if kept is None or len(kept.token_ids) >= len(token_ids):
            return None
        return kept if np.array_equal(token_ids[: len(kept.token_ids)], kept.token_ids) else None

    def clear(self) -> None:
        """Forget everything: the weights are other ones."""
        self._kept.clear()
        self._held = 0

    def _drop(self, uid: str) -> KeptKeys | None:
        kept = self._kept.pop(uid, None)
        if kept:
            self._held -= kept.bytes
        return kept
