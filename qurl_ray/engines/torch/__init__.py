"""The torch engine: batch-invariant decoding in this process, on a CPU or a GPU."""
