"""The ring: rollout side, learner side, and the driver that starts both."""
