"""Plain classes that become Ray actors here, and nowhere else."""
