"""Number formats, quantizers, what they apply to, and the quantized linear. Pure torch."""
