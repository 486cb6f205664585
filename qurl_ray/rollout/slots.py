"""Static key-value slots. Running sequences always fill rows 0 … n-1: a decode step reads a view, never a copy."""

from collections.abc import Sequence

import torch

from qurl_ray.policy.attention import round_up


class SlotCache:
    """Keys and values of all layers, one row per sequence; key j of a row is its token at position j.

    It stands in for a transformers cache: attention layers call `update`. What that does is chosen before the forward,
    by `prefill` or `decode`.
    """

    def __init__(self, *, layers: int, slots: int, kv_heads: int, head_dim: int, length: int) -> None:
        shape = (slots, kv_heads, round_up(length), head_dim)
        # Zeros, not empty memory: a padded key has probability 0, but 0 * nan would be nan.
        self._keys = [torch.zeros(shape) for _ in range(layers)]
        self._values = [torch.zeros(shape) for _ in range(layers)]
        self.slots, self.length = slots, shape[2]

    def prefill(self, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """The next forward holds whole prompts: prompt sources[i] goes to row rows[i]."""
        self._rows, self._sources, self._positions = rows, sources, None

    def decode(self, positions: torch.Tensor) -> None:
        """The next forward holds one token for each of the first len(positions) rows, at these positions."""
        self._rows = torch.arange(len(positions))
        self._positions = positions
        self._visible = round_up(int(positions.max()) + 1)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [B, key heads, T, d]; return the keys and values to attend to."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._positions is None:
            length = key.shape[2]
            keys[self._rows, :, :length] = key[self._sources]
            values[self._rows, :, :length] = value[self._sources]
            return key, value
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        count = len(self._positions)
        return keys[:count, :, : self._visible], values[:count, :, : self._visible]

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy rows, the first `length` positions of each: running rows into the holes that finished ones leave."""
        for part in (*self._keys, *self._values):
            part[targets, :, :length] = part[sources, :, :length]

    def get_seq_length(self, *_: object) -> int:
        """transformers asks; positions are always given explicitly, so the answer is not used."""
        return 0
