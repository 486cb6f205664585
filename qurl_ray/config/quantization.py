"""Settings of the quantization of weights."""

import re
from typing import Literal

from pydantic import Field, field_validator

from qurl_ray.config.section import Section

_EQUALIZED = ("int8", "fp8", "int4", "nvfp4", "nvfp4_w4a4")
"""Formats that `equalize: auto` is for: those that it makes truer (docs/results.md)."""


class QuantizationConfig(Section):
    """Quantization of weights: which linears become codes, and how."""

    kernel: Literal["auto", "emulation"] = "auto"
    """How quantized linears are computed: `auto` uses the device's kernel for the format if there is one, else
    emulation; `emulation` computes the reference in float32."""
    keep: tuple[str, ...] = (r"(^|\.)lm_head\.", r"(^|\.)embed_tokens\.")
    """Regular expressions (re.search) of names of linears that stay in full precision. This is the only such list:
    learner, engines and sync all read it."""
    keep_first_layers: int = Field(0, ge=0)
    """Number of layers, from the first on, whose linears also stay in full precision."""
    keep_last_layers: int = Field(0, ge=0)
    """Number of layers, up to the last, whose linears also stay in full precision."""
    equalize: bool | Literal["auto"] = "auto"
    """Equalization of channels: before codes are made, each channel of a linear's input is divided by a power of two
    and its weights multiplied by it, so that codes are truer at the same speed. `auto`: for int8, fp8, int4, nvfp4 and
    nvfp4_w4a4, where the architecture is known; true: for every format, and an error if the architecture is not known.
    """
    equalize_every: int = Field(20, ge=1)
    """Steps from one look at the factors of `equalize` to the next. They follow the activations of the samples of that
    step's first update."""
    weight_max_code: int | None = Field(None, ge=1)
    """Upper bound on weight codes, below the format's own; int4 with 1 has ternary weights. null leaves the format's.
    For experiments with a mismatch as large as that of large models and long answers."""
    backward: Literal["auto", "quantized", "straight_through", "full"] = "auto"
    """How the gradients of linears are computed in a unified precision flow: `quantized` computes both from FP8 codes
    (fp8_block only); `straight_through` from the forward's dequantized operands; `full` from weights and activations in
    full precision; `auto` is `quantized` with fp8_block, else `straight_through`."""
    uaq_scale: float = Field(1.0, ge=1)
    """Scale s of update-aware quantization: weights of linears that a norm feeds are divided by s, and the norm's gain
    is multiplied by s, so that an update moves their codes s times as far. 1 is off."""
    uaq_layers: Literal["qkv", "qkv+mlp"] = "qkv+mlp"
    """Linears that `uaq_scale` applies to: `qkv` is the query, key and value projections; `qkv+mlp` is these and the
    MLP's gate and up projections."""

    def equalizes(self, format_name: str) -> bool:
        """Return True if codes of this format are equalized, provided that the architecture is known."""
        return format_name in _EQUALIZED if self.equalize == "auto" else self.equalize

    def kept(self, layers: int) -> tuple[str, ...]:
        """Return `keep` with patterns added for the first and last layers that are kept, for a model of so many
        layers."""
        ends = [*range(self.keep_first_layers), *range(max(0, layers - self.keep_last_layers), layers)]
        return (*self.keep, *(rf"(^|\.)layers\.{layer}\." for layer in sorted(set(ends))))

    @field_validator("keep")
    @classmethod
    def _patterns_compile(cls, keep: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in keep:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return keep
