"""Keys and values rounded to E4M3, one definition for engine and learner.

    scale = the smallest power of two ≥ MARGIN · max|x| / 448, of one layer and key head
    code  = E4M3(x / scale), values beyond ±448 saturated; what queries attend to is code · scale

The maxima are of keys after rotary embedding, over a fixed sequence, computed anew for every version of the weights.
Dividing by a power of two is exact: a larger or smaller one only moves what saturates and what is subnormal, so scales
hardly matter, and those of two machines whose last bits differ are the same unless a maximum lies on the border.
"""

import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from qurl_ray.quant.quantize import floats

E4M3_MAX = 448.0
MARGIN = 2.0  # over what the fixed sequence showed, for sequences that it did not
CALIBRATION_TOKENS = 64
_SEED = 2506
_MANTISSA, _EXPONENT = 0x007FFFFF, 0x7F800000  # bits of a float32


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScales:
    """Of one layer, float32 [key heads]: powers of two."""

    key: torch.Tensor
    value: torch.Tensor


def power_of_two_scales(maxima: torch.Tensor) -> torch.Tensor:
    """float32 scales for largest absolute values, any shape; 1 for 0, inf and nan."""
    wanted = maxima.float() / (E4M3_MAX / MARGIN)
    # The carry of all mantissa bits rounds every number up to a power of two but those that are one.
    scale = ((wanted.view(torch.int32) + _MANTISSA) & _EXPONENT).view(torch.float32)
    return torch.where((wanted > 0) & wanted.isfinite(), scale, 1.0)


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn codes [B, key heads, T, d] of x; nan stays nan."""
    # A cast alone makes nan of what is too large.
    return (x.float() / scale[:, None, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [B, key heads, T, d], exact unless subnormal."""
    return floats(codes).mul_(scale[:, None, None])


def rounded(key: torch.Tensor, value: torch.Tensor, scales: KVScales) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, key heads, T, d] each, of their own types: what a cache with these scales would give back."""
    pairs = ((key, scales.key), (value, scales.value))
    key, value = (dequantize(quantize(part, scale), scale).to(part.dtype) for part, scale in pairs)
    return key, value


def calibration_ids(config: PreTrainedConfig) -> list[int]:
    """The fixed sequence for a model: CALIBRATION_TOKENS random tokens, fewer in a short context, and one more.

    The one more is not measured: a learner's forward over padded rows leaves the last token out.
    """
    tokens = min(CALIBRATION_TOKENS + 1, config.max_position_embeddings)
    draw = random.Random(_SEED)  # its random() is the same in every version of Python
    return [int(draw.random() * config.vocab_size) for _ in range(tokens)]


class MaximaRecorder:
    """Measures the calibration sequence. It stands in for a transformers cache, and for the engine's, while prompts are
    computed; `update` may also be called by attention itself."""

    hidden = None
    """The engine's decoder asks whether this is a decode step."""

    def __init__(self, ids: list[int]) -> None:
        self._tokens = len(ids) - 1
        self._scales: dict[int, KVScales] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take [1, key heads, T, d] of one layer; return them."""
        largest = (part[:, :, : self._tokens].abs().amax(dim=(0, 2, 3)) for part in (key, value))
        of_key, of_value = map(power_of_two_scales, largest)
        self._scales[layer_idx] = KVScales(key=of_key, value=of_value)
        return key, value

    def get_seq_length(self, *_: object) -> int:
        """transformers asks; positions are always given explicitly, so the answer is not used."""
        return 0

    def scales(self) -> dict[int, KVScales]:
        """By layer, after the forward."""
        return dict(self._scales)
