"""The learner, which trains the policy in full precision: batches, backends, updates."""
