"""Rollout workers and verifiers: plain classes that become Ray actors here, with their placement and supervision."""
