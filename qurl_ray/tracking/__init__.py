"""Records of a run: metrics.jsonl, samples.jsonl, the console, and MLflow (imported only when it is used)."""

from qurl_ray.tracking.tracker import Tracker

__all__ = ["Tracker"]
