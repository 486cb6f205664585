"""Distribution of a run's events in the driver: every event goes to every sink, and no sink can stop the run."""

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qurl_ray.config import RunConfig
from qurl_ray.config.shown import reason, redacted, shown_address
from qurl_ray.errors import ConfigError, ExtensionError
from qurl_ray.extensions import described
from qurl_ray.runs.json_lines import MetricsFile, StepsFile, prompts_file, samples_file, timeline_file
from qurl_ray.tables import SINKS
from qurl_ray.tracking.callback import CallbackSink
from qurl_ray.tracking.console import open_console
from qurl_ray.tracking.sink import Sink
from qurl_ray.tracking.stages import Stages
from qurl_ray.types import Event, Outcome

if TYPE_CHECKING:
    from qurl_ray.tracking.mlflow_sink import MlflowSink

_RUN_ID_S = 30.0


class Tracker:
    """Owner of the sinks of one run. Events may come from any thread.

    Example:
        with Tracker(run_dir, config, resolved=config.model_dump(mode="json")) as tracker:
            tracker.handle(Event(kind="step", step=1, values={"reward/mean": 0.4}))
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        *,
        resolved: dict[str, Any],
        sinks: Iterable[Sink] = (),
        console: Console | None = None,
    ) -> None:
        """Open every sink.

        Args:
            resolved: the whole config as plain nested values.
            sinks: further sinks.
            console: console to print to, for tests; standard output if absent.

        Raises:
            ConfigError: run_dir is not writable, or one of tracking.sinks cannot be created. It is better to know this
                now than after an hour.
        """
        self.run_dir = run_dir
        self._lock = threading.RLock()
        self._step = 0
        self._failed: set[str] = set()
        self._closed = False
        self._mlflow: MlflowSink | None = None
        self._files = _open_files(run_dir)
        self._sinks: list[Sink] = list(self._files)
        screen = open_console(
            config.tracking.console,
            steps=config.steps,
            title=config.name,
            may_end_early=config.evaluation.target_reward is not None,
            console=console,
        )
        if screen:  # first, so that it shows the notices of the others while they close
            self._sinks.append(screen)
        self._sinks.append(Stages(run_dir / "logs" / "stages.log", screen.stage if screen else None))
        try:
            for name in config.tracking.sinks:
                self._sinks.append(_open_sink(name, run_dir, resolved))
        except ConfigError:
            for sink in self._sinks[::-1]:
                if sink is not screen:  # it would only repeat the error
                    self._guarded(sink, partial(sink.close, "failed"))
            raise
        self._sinks += sinks
        if config.tracking.mlflow:
            self._open_mlflow(config, resolved)

    def handle(self, event: Event) -> None:
        """Pass `event` to every sink. Return at once and never raise."""
        with self._lock:
            self._step = max(self._step, event.step)
            self._deliver(event)
            for sink in self._sinks:
                for notice in self._notices(sink):
                    self._warn(notice, besides=sink.name)

    def rewind(self, step: int, evaluations: Iterable[str] = ()) -> None:
        """Remove events after `step` from the files: these steps are repeated. Warn of damage in them.

        Args:
            evaluations: labels of the evaluations up to `step`.
        """
        metrics, *others = self._files
        with self._lock:
            self._step = step
            self._guarded(metrics, partial(self._warn_of, partial(metrics.rewind, step, evaluations)))
            for file in others:
                self._guarded(file, partial(self._warn_of, partial(file.rewind, step)))

    def _warn_of(self, rewind: Callable[[], list[str]]) -> None:
        """Call `rewind`, and warn of the damage that it returns."""
        for damage in rewind():
            self._warn(damage)

    def mlflow_run_id(self, timeout_s: float = _RUN_ID_S) -> str | None:
        """Id of the MLflow run; None if MLflow is off, has failed, or needs longer than `timeout_s` seconds."""
        return self._mlflow.run_id(timeout_s) if self._mlflow else None

    @property
    def mlflow_uri(self) -> str | None:
        """Address of MLflow's store without its password, the argument of `mlflow ui --backend-store-uri`; None if
        MLflow is off."""
        return shown_address(self._mlflow.uri) if self._mlflow else None

    @property
    def mlflow_page(self) -> str | None:
        """Address of MLflow's page of the training runs; None if MLflow is off or has none."""
        return self._mlflow.page() if self._mlflow else None

    def close(self, outcome: Outcome) -> None:
        """Write all outstanding records and end the MLflow run. Later calls and events do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # The sinks opened last close first: MLflow copies the files, and its last notices reach file and console.
            while self._sinks:
                sink = self._sinks[-1]
                self._guarded(sink, partial(sink.close, outcome))
                self._sinks.pop()
                for notice in self._notices(sink):
                    self._warn(notice)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close("finished")
        else:
            self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")

    def _open_mlflow(self, config: RunConfig, resolved: dict[str, Any]) -> None:
        try:
            # Imported here, because it takes over a second, which runs without MLflow need not spend. Imported in this
            # thread, because two threads that import large packages at once may see half-initialised modules.
            from qurl_ray.tracking.mlflow_sink import MlflowSink, plan_run

            plan = plan_run(self.run_dir, config, resolved)
            self._mlflow = MlflowSink(plan, run_dir=self.run_dir, resolved=resolved)
        except Exception as error:  # a broken installation of MLflow is no reason not to train
            self._warn(f"MLflow is off ({reason(error)}); metrics.jsonl is complete")
        else:
            self._sinks.append(self._mlflow)

    def _deliver(self, event: Event, *, besides: str = "") -> None:
        at = time.time()
        # A timeline is neither a message nor a metric, so it goes only to files.
        sinks = [sink for sink in self._sinks if event.kind != "timeline" or sink in self._files]
        for sink in sinks:
            if sink.name != besides:
                self._guarded(sink, partial(sink.handle, event, at))

    def _guarded(self, sink: Sink, action: Callable[[], None]) -> None:
        """Run `action`; report a sink's first failure to the others. It stays in use: a full disk may be freed."""
        try:
            action()
        except Exception as error:  # whatever a sink raises, training continues
            if sink.name not in self._failed:
                self._failed.add(sink.name)
                ours = type(sink).__module__.startswith("qurl_ray.") and not isinstance(sink, CallbackSink)
                cause = f"{type(error).__name__}: {error}" if ours else described(error)
                self._warn(f"{sink.name} failed ({cause}); training goes on", besides=sink.name)

    def _notices(self, sink: Sink) -> list[str]:
        """Return the sink's notices; none if it fails."""
        notices: list[str] = []
        self._guarded(sink, lambda: notices.extend(sink.notices() or ()))
        return notices

    def _warn(self, message: str, *, besides: str = "") -> None:
        self._deliver(Event(kind="warning", step=self._step, message=redacted(message)), besides=besides)


def _open_files(run_dir: Path) -> tuple[MetricsFile, *tuple[StepsFile, ...]]:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return MetricsFile(run_dir), samples_file(run_dir), prompts_file(run_dir), timeline_file(run_dir)
    except OSError as error:
        raise ConfigError(f"cannot write to the run folder {run_dir} ({error.strerror}); set output_dir") from error


def _open_sink(name: str, run_dir: Path, settings: dict[str, Any]) -> Sink:
    """Create and check a sink from outside the package."""
    make = SINKS.load(name)
    try:
        sink = make(run_dir, settings)
    except Exception as error:  # a user's class may raise anything
        raise ExtensionError(f"sink {name!r} cannot be made: {described(error)}") from error
    lacks = [part for part in ("name", "handle", "notices", "close") if not hasattr(sink, part)]
    if lacks:
        raise ConfigError(f"sink {name!r} has no {lacks[0]}: see qurl_ray.tracking.sink.Sink")
    return sink
