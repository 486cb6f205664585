"""Processes that run a user's code with limits, can be killed, and leave nothing behind."""
