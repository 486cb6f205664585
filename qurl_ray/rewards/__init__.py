"""Rewards: how an answer is scored, and a killable process that does the scoring."""
