"""Tasks: training and held-out problems, the order in which they are drawn, and their prompts as tokens."""
