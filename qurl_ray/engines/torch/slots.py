"""Static key-value slots. Running sequences always fill rows 0 … n-1: a decode step reads a view, never a copy."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qurl_ray.policy.attention import hidden_keys, round_up
from qurl_ray.policy.kv import KVScales, MaximaRecorder, dequantize_kv, quantize_kv, rounded


class SlotCache:
    """Keys and values of all layers, one row per sequence; key j of a row belongs to its token at position j.

    It takes the place of a transformers cache: attention layers call `update`. `prefill`, `extend` or `decode`, called
    before the forward pass, selects what `update` does.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (slots, kv_heads, round_up(length), head_dim)
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        # Zeros, not empty memory: a padded key has probability 0, but 0 * nan would be nan.
        self._keys = [torch.zeros(shape, **kind) for _ in range(layers)]
        self._values = [torch.zeros(shape, **kind) for _ in range(layers)]
        self.slots, self.length, self.device = slots, shape[2], self._keys[0].device
        self._mask_like = torch.empty(0, device=device, dtype=dtype if dtype.is_floating_point else torch.float32)
        self.hidden: torch.Tensor | None = None
        """Mask of a decode step, [B, 1, 1, keys]: -inf where a row's keys end; None while prompts are computed."""
        self._whole = True
        """False while rows are extended: keys before the computed ones are there."""

    def prefill(self, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Prepare a forward pass over whole prompts: prompt sources[i] is stored in row rows[i]."""
        self._rows, self._sources, self.hidden, self._whole = rows, sources, None, True

    def extend(self, first: int, positions: torch.Tensor) -> None:
        """Prepare a forward pass over tokens at these positions [B, T] of the rows first … first + B - 1, whose earlier
        keys are there. Positions behind the end of a row are padding."""
        count = len(positions)
        self.hidden, self._whole = None, False
        self._first, self._count, self._visible = first, first + count, round_up(int(positions.max()) + 1)
        self._places = self._flat(torch.arange(first, first + count), positions)

    def decode(self, positions: torch.Tensor, visible: int | None = None) -> None:
        """Prepare a forward pass over one token for each of the first len(positions) rows, at these positions.

        Args:
            visible: number of keys to attend to, a multiple of 16; None means those up to the last position. If it is
                given and positions are on the cache's device, nothing is read back from that device.
        """
        count, where = len(positions), positions.device
        self._first, self._count = 0, count
        self._visible = visible or round_up(int(positions.max()) + 1)
        self._places = self._flat(torch.arange(count, device=where), positions[:, None])
        hidden = hidden_keys(positions[:, None], self._visible)[:, None]
        self.hidden = torch.zeros(hidden.shape, device=where).masked_fill_(hidden, -torch.inf).to(self._mask_like)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store key and value [B, key heads, T, d]; return the keys and values to attend to, as they were stored."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self.hidden is None and self._whole:
            length = key.shape[2]
            keys[self._rows, :, :length] = key[self._sources]
            values[self._rows, :, :length] = value[self._sources]
            return key, value
        width = key.shape[-1]
        keys.view(-1, width).index_copy_(0, self._places, key.reshape(-1, width))
        values.view(-1, width).index_copy_(0, self._places, value.reshape(-1, width))
        rows = slice(self._first, self._count)
        return keys[rows, :, : self._visible], values[rows, :, : self._visible]

    def _flat(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the place of each (row, head, position) in a flat list of all keys of a layer, from [B] and [B, T]."""
        heads = torch.arange(self._keys[0].shape[1], device=rows.device)
        of_heads = rows[:, None] * len(heads) + heads
        return (of_heads[:, :, None] * self.length + positions[:, None]).flatten().to(self.device)

    def read(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of a row's first keys and values, as they are stored, both [layers, key heads, length, d]."""
        keys = torch.stack([layer[row, :, :length] for layer in self._keys])
        values = torch.stack([layer[row, :, :length] for layer in self._values])
        return keys, values

    def write(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store what `read` returned as the first keys and values of a row."""
        length = keys.shape[2]
        for index in range(len(self._keys)):
            self._keys[index][row, :, :length] = keys[index]
            self._values[index][row, :, :length] = values[index]

    def bytes_of(self, length: int) -> int:
        """Return the bytes of a row's first keys and values."""
        keys = self._keys[0]
        return 2 * len(self._keys) * keys.shape[1] * length * keys.shape[3] * keys.element_size()

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of rows: running rows fill the holes that finished ones leave."""
        for part in (*self._keys, *self._values):
            part[targets, :, :length] = part[sources, :, :length]

    def get_seq_length(self, *_: object) -> int:
        """Return 0. transformers calls this; positions are given explicitly, so the result is not used."""
        return 0


class WholeSequences:
    """Takes the place of a cache where whole sequences are computed at once, and nothing has to be kept.

    Args:
        scales: scales of keys and values by layer index, by which they are rounded as in Fp8SlotCache; None for none.
    """

    hidden = None

    def __init__(self, scales: Mapping[int, KVScales] | None) -> None:
        self._scales = scales

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the key and value to attend to, [B, key heads, T, d]."""
        return rounded(key, value, self._scales[layer_idx]) if self._scales else (key, value)

    def get_seq_length(self, *_: object) -> int:
        """Return 0. transformers calls this; positions are given explicitly, so the result is not used."""
        return 0


class Fp8SlotCache(SlotCache):
    """SlotCache that holds E4M3 codes, in a quarter of the memory. Each step dequantizes all keys and values that it
    reads, because no kernel on a CPU reads codes.

    Args:
        scales: scales of keys and values by layer index.
    """

    def __init__(self, scales: Mapping[int, KVScales], *, dtype: torch.dtype = torch.float32, **shape: Any) -> None:
        super().__init__(**shape, dtype=torch.uint8)  # rows of float8_e4m3fn could not be copied by index
        self._scales, self._mask_like = scales, self._mask_like.to(dtype)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scales = self._scales[layer_idx]
        key_codes, value_codes = quantize_kv(key, scales.key), quantize_kv(value, scales.value)
        keys, values = super().update(key_codes.view(torch.uint8), value_codes.view(torch.uint8), layer_idx)
        float8 = key_codes.dtype
        keys, values = dequantize_kv(keys.view(float8), scales.key), dequantize_kv(values.view(float8), scales.value)
        return keys.to(key.dtype), values.to(key.dtype)


Cache = SlotCache | WholeSequences | MaximaRecorder
"""Receiver of keys and values in a forward pass."""
