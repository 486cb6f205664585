"""Policies: how to get one, its log-probs, and how to save it. Engine and learner share the forward defined here."""
