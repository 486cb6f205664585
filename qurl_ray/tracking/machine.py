"""How busy the driver's machine is: processor, memory, disk, network and, where NVIDIA's library is, its GPUs.

MLflow's own monitor ends at the first answer that its server fails to give. Its instruments are used here, and what
they read is handed to whoever queues it.
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
    """Reads the instruments every so many seconds, in a daemon thread, until `stop`.

    Args:
        take: gets the readings as {"system/cpu_utilization_percentage": 12.5, …}; called in the thread.
        interval_s: seconds; if absent, $MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL or 10.
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
            instrument.collect_metrics()  # use since the last reading is 0 at the first
            instrument.clear_metrics()
        while not self._stopped.wait(self._interval_s):
            try:
                self._take({f"system/{key}": value for i in instruments for key, value in _read(i).items()})
            except Exception as error:  # figures beside the training are no reason to disturb it
                _log.warning("the machine's use is no longer recorded (%s: %s)", type(error).__name__, error)
                return


def _instruments() -> list[BaseMetricsMonitor]:
    found: list[BaseMetricsMonitor] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    try:
        found.append(GPUMonitor())
    except Exception:  # neither the library nor a GPU
        _log.debug("no GPU is watched", exc_info=True)
    return found


def _read(instrument: BaseMetricsMonitor) -> dict[str, float]:
    instrument.collect_metrics()
    values = instrument.aggregate_metrics()
    instrument.clear_metrics()
    return values
