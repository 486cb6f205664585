"""The mathematics of the updates: pure functions of tensors and numbers."""
