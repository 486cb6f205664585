"""Tasks: problems to train on and held-out ones, the order they are drawn in, and their prompts as tokens."""
