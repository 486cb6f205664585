"""The actor between rollout side and learner side."""
