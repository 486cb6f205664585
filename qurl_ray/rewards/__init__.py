"""Rewards: functions that score answers, and a process that runs them and can be killed."""
