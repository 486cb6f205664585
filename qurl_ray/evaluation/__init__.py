"""How good a policy is: mean reward and problems solved of greedy answers, avg@k and pass@k, with intervals."""
