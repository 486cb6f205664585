"""Weight sync from learner to engines: weights are quantized once, at the sender, and verified in the engines."""
