"""Evaluation of policies: mean reward and solved problems of greedy answers, avg@k and pass@k, with intervals."""
