"""Weights from learner to engines: quantized once at the sender, verified where they end up."""
