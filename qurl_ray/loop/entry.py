"""What Ray Train is given to run. It imports almost nothing, because Ray's controller imports it too, and the learner's
own imports take seconds."""

from typing import Any


def train_entry(context: dict[str, Any]) -> None:
    """Run one learner rank; see loop.train. Errors of ours are the coordinator's to keep, and end the run: no restart
    would mend them. All others, and the coordinator's death, are left to Ray Train, which starts the ranks anew."""
    from qurl_ray.errors import CoordinatorDied, QurlError
    from qurl_ray.loop.train import fail, train_loop

    try:
        train_loop(context)
    except CoordinatorDied:
        raise
    except QurlError as error:
        fail(context, error)
