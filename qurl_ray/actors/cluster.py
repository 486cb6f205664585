"""Connection to a Ray cluster, and queries of its resources, its autoscaler, and this process's GPUs and log file."""

import json
import logging
import os
import re
import signal
import socket
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import services, worker
from ray._private.gcs_utils import create_gcs_channel
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import state
from ray.exceptions import AuthenticationError
from ray.experimental.internal_kv import _internal_kv_get
from ray.util import placement_group_table

from qurl_ray.actors.placement import Demand, GpuAssignment, counts, what_is_missing
from qurl_ray.config.shown import reason
from qurl_ray.errors import ConfigError, PlacementError, QurlError
from qurl_ray.files import why_unwritable

logger = logging.getLogger(__name__)

_CONNECT_S, _ANSWER_S = 10.0, 30.0
_SESSION = "%Y-%m-%d_%H-%M-%S_%f"
"""Time in the name of the folder of a Ray."""
_STARTS, _LATE = 3, "timed out during startup"
_LONGEST_SOCKET = 107 if sys.platform == "linux" else 103
"""Largest number of bytes in the path of a socket."""
_ASK = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""Call that every head node answers. Ray's client server, at ray://, answers that it has no such call."""


def check_address() -> None:
    """Check that a Ray cluster answers at $RAY_ADDRESS, if it is set. Ray itself would retry silently for over ten
    minutes.

    Raises:
        ConfigError: nothing listens there, or something that is no Ray, or it is no address.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    match = re.fullmatch(r"(ray://)?([^\s/]+):(\d+)", address)
    if not match:
        if address in ("", "auto", "local") or ("://" in address and not address.startswith("http")):
            return  # Ray resolves them
        raise ConfigError(f"RAY_ADDRESS={address} is no address of a Ray cluster, such as 10.0.0.1:6379")
    scheme, host, port = match.groups()
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({error}); without RAY_ADDRESS, Ray is started here"
        ) from None
    with create_gcs_channel(f"{host}:{port}") as channel:
        try:
            channel.unary_unary(_ASK)(b"", timeout=_ANSWER_S, wait_for_ready=True)
        except grpc.RpcError as error:
            told = error.code()
            allowed = [grpc.StatusCode.UNAUTHENTICATED] + ([grpc.StatusCode.UNIMPLEMENTED] if scheme else [])
            if told not in allowed:
                raise ConfigError(
                    f"what listens at RAY_ADDRESS={address} is no Ray cluster, or one that hangs: asked for its id, it "
                    f"gave no answer of Ray's within {_ANSWER_S:g} s ({told.name})"
                ) from None


def check_ray() -> None:
    """Check that a Ray cluster answers at $RAY_ADDRESS, or, if it is not set, that Ray can be started here.

    Raises:
        ConfigError: see check_address and check_folder.
    """
    if os.environ.get("RAY_ADDRESS"):
        check_address()
    else:
        check_folder()


def check_folder() -> None:
    """Check that a Ray that is started here can write its files, and that the paths of its sockets are short enough.

    Raises:
        ConfigError: it cannot, or they are not.
    """
    folder = Path(get_default_ray_temp_dir()).absolute()
    session = f"session_{datetime.now():{_SESSION}}_{os.getpid()}"
    excess = len(os.fsencode(folder / session / "sockets" / "plasma_store")) - _LONGEST_SOCKET
    if excess > 0:
        raise ConfigError(
            f"Ray cannot be started here: the paths of its sockets below {folder} would be {excess} bytes longer than "
            "the system takes; set $RAY_TMPDIR or $TMPDIR to a shorter path, such as /tmp"
        )
    if error := why_unwritable(folder):
        raise ConfigError(f"Ray cannot be started here: {error}; set $RAY_TMPDIR or $TMPDIR to a folder to write in")


def attach(**settings: Any) -> None:
    """Call `ray.init` with these settings, on the cluster of $RAY_ADDRESS.

    Raises:
        ConfigError: there is no cluster, or it refuses this process.
    """
    check_address()
    address = os.environ["RAY_ADDRESS"]
    try:
        ray.init(address, **settings)
    except (ConnectionError, ValueError, AuthenticationError) as error:
        told = str(error)
        if isinstance(error, AuthenticationError) or "AuthenticationError" in str(error.__cause__):
            told = (
                "it asks for a token, and this process has none or another one: set RAY_AUTH_MODE=token, and see "
                "docs/clusters.md for where the token comes from"
            )
        raise ConfigError(f"cannot attach to the Ray cluster at RAY_ADDRESS={address}: {told}") from None


def start(**settings: Any) -> str:
    """Call `ray.init` with these settings, to start a Ray that ends with this process. Return the address of its
    dashboard, "" if it has none.

    Each of Ray's processes leads a process group of its own. In the group of this process they would get the signals
    that a closing terminal, `timeout` or the first process of a container sends to it, and end at once. On Linux the
    kernel kills them if this process is killed; elsewhere a process of Ray's does so, by their group.

    If the start fails or is interrupted, all of them are killed here: their agents would go on for up to a minute. Ray
    gives its own processes 30 s; on a machine that is busy with others it is tried again.

    Raises:
        ConfigError: Ray does not start; the message has Ray's reason.
    """
    check_folder()
    for _ in range(_STARTS - 1):
        try:
            return _start(settings)
        except ConfigError as error:
            if _LATE not in str(error):
                raise
            logger.warning("Ray has not started within its 30 s, as on a busy machine: it is tried again")
    return _start(settings)


def _start(settings: dict[str, Any]) -> str:
    popen, started = services.ConsolePopen, []

    def start_one(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, process_group=0, **options))
        return started[-1]

    if sys.platform == "linux":
        services.ConsolePopen = start_one
    try:
        # "local": do not use another Ray that was left running on this machine
        return ray.init("local", **settings).dashboard_url or ""
    except BaseException as error:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if isinstance(error, Exception) and not isinstance(error, QurlError):
            raise ConfigError(f"Ray cannot be started here: {reason(error)}") from error
        raise
    finally:
        services.ConsolePopen = popen


def kill_actors(class_name: str) -> None:
    """Kill the processes on this node of this job's actors of a class. For actors whose handles Ray keeps to itself."""
    for pid in _processes(class_name, "ALIVE"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def last_lines(class_name: str, count: int = 5) -> list[str]:
    """Return a message for each process on this node of this job's actors of a class: its log file and the last lines
    in it."""
    logs, messages = Path(worker._global_node.get_logs_dir_path()), []
    for pid in _processes(class_name, "ALIVE", "PENDING_CREATION", "RESTARTING"):
        for path in sorted(logs.glob(f"worker-*-{pid}.err")) + sorted(logs.glob(f"worker-*-{pid}.out")):
            lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()][-count:]
            if lines:
                messages.append("\n  ".join([f"last lines of {class_name} (process {pid}) in {path}:", *lines]))
    return messages


def _processes(class_name: str, *states: str) -> list[int]:
    context = ray.get_runtime_context()
    place = (context.get_job_id(), context.get_node_id())
    return [
        actor["Pid"]
        for actor in state.actor_table(None).values()
        if (actor["JobID"], actor["Address"]["NodeID"]) == place
        and actor["ActorClassName"] == class_name
        and actor["State"] in states
        and actor["Pid"]
    ]


def check_room(asked: Demand) -> None:
    """Check, before anything is placed, that the cluster can ever hold this run.

    Where an autoscaler may add nodes of unknown size, nothing is raised here: the deadlines of placement apply.

    Raises:
        PlacementError: the cluster can never hold it.
    """
    missing = what_is_missing(asked, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    if missing and (largest := state.get_max_resources_from_cluster_config()):
        missing = what_is_missing(asked, [largest])  # treated as one node: what does not fit there never will
    elif missing and _autoscales():
        missing = None
    if missing:
        raise PlacementError(f"the cluster can never hold this run: {missing}. It asks for {asked}")


def _autoscales() -> bool:
    """Return True if Ray's first autoscaler may add nodes. Ray has no public API for this. The node types in the status
    report are those that the autoscaler may create, or, without one, "node_<id>" of the existing nodes."""
    status = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    report = json.loads(status).get("autoscaler_report") if status else None
    types = {**(report["active_nodes"] or {}), **(report["idle_nodes"] or {})} if report else {}
    return any(not name.startswith("node_") for name in types)


def there_is() -> str:
    """Resources of the cluster, in total and free now, as text for messages."""
    kinds = {"CPU": 0.0, "GPU": 0.0}
    return (
        f"the cluster has {counts(kinds | ray.cluster_resources())}, "
        f"free now {counts(kinds | ray.available_resources())}"
    )


def without_room(asked: Demand) -> bool:
    """Return True if Ray cannot find resources for the ranks. Ray Train's placement groups have no name, so any waiting
    group with the same bundles is taken for theirs."""
    return any(
        group["state"] == "PENDING"
        and group["stats"]["scheduling_state"] in ("NO_RESOURCES", "INFEASIBLE")
        and group["strategy"] == "PACK"
        and list(group["bundles"].values()) == [asked.rank] * asked.ranks
        for group in placement_group_table().values()
    )


def own_assignment() -> GpuAssignment:
    """Return the node and GPUs that Ray has assigned to this process."""
    context = ray.get_runtime_context()
    return GpuAssignment(node=context.get_node_id(), gpus=tuple(sorted(context.get_accelerator_ids().get("GPU", []))))


def own_log() -> str:
    """Return the path of the log file that Ray has assigned to this process."""
    return os.path.realpath("/proc/self/fd/2")
