"""Settings of the export of the final policy."""

from typing import Literal

from qurl_ray.config.rollout import FormatName
from qurl_ray.config.section import Section


class ExportConfig(Section):
    """Export of the final policy, which is always saved in full precision, under policy/."""

    quantized: Literal["auto", "none", "int8", "fp8", "fp8_block", "int4", "nvfp4", "mxfp4", "mxfp8"] = "auto"
    """Format of an additional compressed-tensors checkpoint that is saved and evaluated: `none` exports none; `auto`
    exports the rollouts' format if it is int8 or fp8, which stock vLLM was tried with; another exports that format.
    `nvfp4_w4a4` cannot be exported: readers take one scale of activations for all tokens. Its weights are nvfp4's."""

    def format(self, rollouts: FormatName) -> FormatName:
        """Return the format of the exported checkpoint for rollouts in that format; "none" is no export."""
        if self.quantized != "auto":
            return self.quantized
        return rollouts if rollouts in ("int8", "fp8") else "none"
