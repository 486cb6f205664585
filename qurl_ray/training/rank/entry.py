"""Entry point of Ray Train's workers. It imports almost nothing, because Ray's controller imports it too, and the
learner's own imports take seconds."""

from typing import Any


def train_entry(context: dict[str, Any]) -> None:
    """Run one learner rank; see training.rank.train.

    Our own errors (QurlError) are reported to the coordinator and end the run, because a restart would not fix them.
    So does any other error that comes a second time in the same place and step. All others, and the coordinator's
    death, are left to Ray Train, which restarts the ranks.
    """
    from qurl_ray.errors import CoordinatorDied, QurlError
    from qurl_ray.training.rank.train import fail, repeated, train_loop

    try:
        train_loop(context)
    except CoordinatorDied:
        raise
    except QurlError as error:
        fail(context, error)
    except Exception as error:
        if (again := repeated(context, error)) is None:
            raise
        fail(context, again)
