"""The full-precision side: batches, backends, updates."""
