"""Keys and values rounded to E4M3, one definition for engine and learner.

    scale = the smallest power of two ≥ MARGIN · max|x| / 448, of one layer and key head
    code  = E4M3(x / scale), values beyond ±448 saturated; queries attend to code · scale

Maxima are taken over a fixed sequence, of keys after rotary embedding, and computed again for every weight version.
Division by a power of two is exact: another power changes only which values saturate or are subnormal, so the choice
of the scale hardly matters. Two machines whose last bits differ get the same scales, unless a maximum lies at the
border between two scales.
"""

import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from qurl_ray.quant.elements import floats

E4M3_MAX = 448.0
MARGIN = 2.0  # headroom above the maxima of the fixed sequence, for other sequences
CALIBRATION_TOKENS = 64
_SEED = 2506
_MANTISSA, _EXPONENT = 0x007FFFFF, 0x7F800000  # bits of a float32


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScales:
    """Scales of one layer, float32 [key heads]: powers of two."""

    key: torch.Tensor
    value: torch.Tensor


def power_of_two_scales(maxima: torch.Tensor) -> torch.Tensor:
    """Return float32 scales for maxima of absolute values, of any shape; 1 for 0, inf and nan."""
    wanted = maxima.float() / (E4M3_MAX / MARGIN)
    # Adding all mantissa bits carries every number up to a power of two, except those that are one.
    scale = ((wanted.view(torch.int32) + _MANTISSA) & _EXPONENT).view(torch.float32)
    return torch.where((wanted > 0) & wanted.isfinite(), scale, 1.0)


def quantize_kv(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return float8_e4m3fn codes [B, key heads, T, d] of x; nan stays nan."""
    # A cast alone would turn values that are too large into nan.
    return (x.float() / scale[:, None, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantize_kv(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return code · scale, float32 [B, key heads, T, d], exact unless subnormal."""
    return floats(codes).mul_(scale[:, None, None])


def rounded(key: torch.Tensor, value: torch.Tensor, scales: KVScales) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value [B, key heads, T, d] as a cache with these scales would return them, in their own types."""
    pairs = ((key, scales.key), (value, scales.value))
    key, value = (dequantize_kv(quantize_kv(part, scale), scale).to(part.dtype) for part, scale in pairs)
    return key, value


def calibration_ids(config: PreTrainedConfig, count: int = CALIBRATION_TOKENS) -> list[int]:
    """Return the fixed sequence for a model: `count` random tokens, fewer in a short context, and one more.

    The last token is not measured, because a learner's forward pass over padded rows leaves it out.
    """
    tokens = min(count + 1, config.max_position_embeddings)
    draw = random.Random(_SEED)  # its random() is the same in every version of Python
    return [int(draw.random() * config.vocab_size) for _ in range(tokens)]


class MaximaRecorder:
    """Measures scales on the calibration sequence.

    It takes the place of a transformers cache, or of the engine's cache, while prompts are computed. Attention may
    also call `update` itself.

    Args:
        per_layer: the key heads of a layer have one scale.
    """

    hidden = None
    """None tells the engine's decoder that this is not a decode step."""

    def __init__(self, ids: list[int], *, per_layer: bool = False) -> None:
        self._tokens, self._per_layer = len(ids) - 1, per_layer
        self._scales: dict[int, KVScales] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Measure key and value [1, key heads, T, d] of one layer; return them unchanged."""
        largest = [part[:, :, : self._tokens].abs().amax(dim=(0, 2, 3)) for part in (key, value)]
        if self._per_layer:
            largest = [of_heads.max().expand_as(of_heads) for of_heads in largest]
        of_key, of_value = map(power_of_two_scales, largest)
        self._scales[layer_idx] = KVScales(key=of_key, value=of_value)
        return key, value

    def get_seq_length(self, *_: object) -> int:
        """Return 0. transformers calls this; positions are given explicitly, so the result is not used."""
        return 0

    def scales(self) -> dict[int, KVScales]:
        """Return the scales by layer index, after the forward pass."""
        return dict(self._scales)
