"""How good a policy is: greedy accuracy, avg@k and pass@k, with intervals."""
