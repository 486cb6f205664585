"""Utilisation of the driver's machine: processor, memory, disk, network and, if NVIDIA's library is there, GPUs.

MLflow's own monitor stops at the first failed request to its server. This module uses the instruments of that monitor,
and passes their readings to the caller, who queues them.
"""

import logging
import threading
from collections.abc import Callable

from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL
from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

_INTERVAL_S = 10.0
_log = logging.getLogger(__name__)


class MachineWatch:
    """Reads the instruments at a fixed interval, in a daemon thread, until `stop` is called.

    Args:
        take: called in the thread with the readings, such as {"system/cpu_utilization_percentage": 12.5, …}.
        interval_s: interval in seconds; if absent, $MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL or 10.
    """

    def __init__(self, take: Callable[[dict[str, float]], None], interval_s: float | None = None) -> None:
        self._take = take
        self._interval_s = interval_s or MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() or _INTERVAL_S
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="tracking-machine", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        instruments = _instruments()
        for instrument in instruments:
            instrument.collect_metrics()  # figures since the last reading are 0 at the first reading
            instrument.clear_metrics()
        while not self._stopped.wait(self._interval_s):
            try:
                self._take({f"system/{key}": value for i in instruments for key, value in _read(i).items()})
            except Exception as error:  # a failure of these figures must not disturb the training
                _log.warning("the machine's use is no longer recorded (%s: %s)", type(error).__name__, error)
                return


def _instruments() -> list[BaseMetricsMonitor]:
    found: list[BaseMetricsMonitor] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    try:
        found.append(GPUMonitor())
    except Exception:  # the library or a GPU is missing
        _log.debug("no GPU is watched", exc_info=True)
    return found


def _read(instrument: BaseMetricsMonitor) -> dict[str, float]:
    instrument.collect_metrics()
    values = instrument.aggregate_metrics()
    instrument.clear_metrics()
    return values
