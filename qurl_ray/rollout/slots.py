"""Static key-value slots. Running sequences always fill rows 0 … n-1: a decode step reads a view, never a copy."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qurl_ray.policy.attention import hidden_keys, round_up
from qurl_ray.policy.kv import KVScales, dequantize_kv, quantize_kv


class SlotCache:
    """Keys and values of all layers, one row per sequence; key j of a row belongs to its token at position j.

    It takes the place of a transformers cache: attention layers call `update`. `prefill` or `decode`, called before the
    forward pass, selects what `update` does.
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

    def prefill(self, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Prepare a forward pass over whole prompts: prompt sources[i] is stored in row rows[i]."""
        self._rows, self._sources, self.hidden = rows, sources, None

    def decode(self, positions: torch.Tensor, visible: int | None = None) -> None:
        """Prepare a forward pass over one token for each of the first len(positions) rows, at these positions.

        Args:
            visible: number of keys to attend to, a multiple of 16; None means those up to the last position. If it is
                given and positions are on the cache's device, nothing is read back from that device.
        """
        count, heads, where = len(positions), self._keys[0].shape[1], positions.device
        self._count = count
        self._visible = visible or round_up(int(positions.max()) + 1)
        rows = torch.arange(count, device=where)[:, None] * heads + torch.arange(heads, device=where)
        self._places = (rows * self.length + positions[:, None]).flatten().to(self.device)
        hidden = hidden_keys(positions[:, None], self._visible)[:, None]
        self.hidden = torch.zeros(hidden.shape, device=where).masked_fill_(hidden, -torch.inf).to(self._mask_like)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store key and value [B, key heads, T, d]; return the keys and values to attend to, as they were stored."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self.hidden is None:
            length = key.shape[2]
            keys[self._rows, :, :length] = key[self._sources]
            values[self._rows, :, :length] = value[self._sources]
            return key, value
        width = key.shape[-1]
        keys.view(-1, width).index_copy_(0, self._places, key.reshape(-1, width))
        values.view(-1, width).index_copy_(0, self._places, value.reshape(-1, width))
        return keys[: self._count, :, : self._visible], values[: self._count, :, : self._visible]

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of rows: running rows fill the holes that finished ones leave."""
        for part in (*self._keys, *self._values):
            part[targets, :, :length] = part[sources, :, :length]

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
        codes = quantize_kv(key, scales.key), quantize_kv(value, scales.value)
        keys, values = super().update(codes[0].view(torch.uint8), codes[1].view(torch.uint8), layer_idx)
        float8 = codes[0].dtype
        found = dequantize_kv(keys.view(float8), scales.key), dequantize_kv(values.view(float8), scales.value)
        return found[0].to(key.dtype), found[1].to(key.dtype)
