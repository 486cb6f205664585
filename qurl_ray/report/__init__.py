"""Pages of a run, read from its folder: the report, comparisons, the rollout viewer and the timeline."""
