"""Environments: what a policy talks to in several turns, and the processes that they run in."""
