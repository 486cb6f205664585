"""The coordinator: the actor between rollout side and learner side."""
