"""The command `qurl`."""
