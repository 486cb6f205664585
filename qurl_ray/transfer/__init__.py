"""Means by which processes give each other the bytes of tensors: shared memory, and groups that broadcast."""
