"""What each worker of Ray Train runs: a rank of the learner."""
