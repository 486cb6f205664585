"""What Ray Train is given to run. It imports almost nothing, because Ray's controller imports it too, and the learner's
own imports take seconds."""

from typing import Any


def train_entry(context: dict[str, Any]) -> None:
    """Run one learner rank; see loop.train."""
    from qurl_ray.loop.train import train_loop

    train_loop(context)
