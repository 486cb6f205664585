"""The driver, which is the job's process: it prepares, starts and watches a run, and reports on it."""
