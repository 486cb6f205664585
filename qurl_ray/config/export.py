"""Settings of the export of the final policy."""

from typing import Literal

from qurl_ray.config.rollout import FormatName
from qurl_ray.config.section import Section


class ExportConfig(Section):
    """Export of the final policy, which is always saved in full precision, under policy/."""

    quantized: Literal["auto", "none", "int8", "fp8"] = "auto"
    """Format of an additional compressed-tensors checkpoint that is saved and evaluated, and that vLLM can load: `none`
    exports none; `int8` and `fp8` export that format; `auto` exports the rollouts' format if it is int8 or fp8 (int4
    and fp8_block cannot be exported)."""

    def format(self, rollouts: FormatName) -> Literal["none", "int8", "fp8"]:
        """Return the format of the exported checkpoint for rollouts in that format; "none" is no export."""
        if self.quantized != "auto":
            return self.quantized
        return rollouts if rollouts in ("int8", "fp8") else "none"
