"""Tools: functions that a policy may call, and the calls in its text."""
