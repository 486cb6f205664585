"""TensorBoard and Weights & Biases, beside MLflow: `tracking.sinks=[tensorboard,wandb]`.

Both get every number of steps, evaluations and the summary, under the names of metrics.jsonl. A run that resumes
continues in the same files and the same W&B run; steps that are repeated replace the earlier ones.
"""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qurl_ray.config.shown import shown
from qurl_ray.tracking.numbers import event_numbers
from qurl_ray.tracking.sink import Sink
from qurl_ray.types import Event, Outcome

_KINDS = ("step", "evaluation", "summary")


class TensorBoard(Sink):
    """Sink that writes event files to the run's folder `tensorboard`; `tensorboard --logdir` shows them."""

    name = "TensorBoard"

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._folder = run_dir / "tensorboard"
        self._folder.mkdir(exist_ok=True)
        self._writer: Any = None
        self._step = -1

    def handle(self, event: Event, at: float) -> None:
        """Write the numbers of an event."""
        if event.kind not in _KINDS:
            return
        if self._writer is None or (event.kind == "step" and event.step <= self._step):
            from tensorboardX import SummaryWriter

            if self._writer is not None:
                self._writer.close()
            earlier = len(list(self._folder.iterdir()))
            # The first record of the new file withdraws the records of earlier files from this step on. Names have
            # seconds: the number tells apart, and puts in order, two files of one second.
            self._writer = SummaryWriter(
                str(self._folder), purge_step=event.step if earlier else None, filename_suffix=f".{earlier:06d}"
            )
        if event.kind == "step":
            self._step = event.step
        for name, value in event_numbers(event).items():
            self._writer.add_scalar(name, value, event.step, walltime=at)
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class WandB(Sink):
    """Sink that logs to Weights & Biases, or with WANDB_MODE=offline to the run's folder `wandb`. Its own variables
    (WANDB_PROJECT, WANDB_ENTITY, …) apply; without them, the project is tracking.experiment."""

    name = "W&B"

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        known = run_dir / "wandb_run_id"
        identity = known.read_text().strip() if known.is_file() else uuid.uuid4().hex[:16]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or settings["tracking"]["experiment"],
            name=settings["name"],
            id=identity,
            resume="allow",
            dir=str(run_dir),
            config=shown(dict(settings)),
            settings=wandb.Settings(console="off", silent=True),
        )
        known.write_text(identity + "\n")
        # W&B drops values of a step before its last one; as a metric, a step can come again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def handle(self, event: Event, at: float) -> None:
        """Log the numbers of an event."""
        if event.kind == "summary":
            self._run.summary.update(event_numbers(event))
        elif event.kind in _KINDS:
            self._run.log({**event_numbers(event), "step": event.step})

    def close(self, outcome: Outcome) -> None:
        """End the run, and wait until all is sent."""
        self._run.finish(exit_code=0 if outcome == "finished" else 1)
