"""A rank of the learner: the code that each worker of Ray Train runs."""
