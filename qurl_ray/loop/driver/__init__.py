"""The process of the job: prepare, start, watch, account for a run."""
