"""Number formats, quantizers, the selection of what is quantized, and the quantized linear. Pure torch."""
