"""The way to a Ray cluster that runs already, and what it has, may get, and gave to this process."""

import json
import os
import socket
from typing import Any

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import state
from ray.exceptions import AuthenticationError
from ray.experimental.internal_kv import _internal_kv_get
from ray.util import placement_group_table

from qurl_ray.actors.placement import Demand, Seat, counts, what_is_missing
from qurl_ray.errors import ConfigError, PlacementError

_CONNECT_S = 10.0


def check_address() -> None:
    """Whether anything listens at $RAY_ADDRESS, if it is set; Ray itself would try for over ten minutes, in silence.

    Raises:
        ConfigError: nothing does.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # "auto" and "local", which Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({error}); without RAY_ADDRESS, Ray is started here"
        ) from None


def attach(**settings: Any) -> None:
    """`ray.init`, with these settings, to the cluster of $RAY_ADDRESS.

    Raises:
        ConfigError: there is none, or it refuses this process.
    """
    check_address()
    address = os.environ["RAY_ADDRESS"]
    try:
        ray.init(address, **settings)
    except (ConnectionError, AuthenticationError) as error:
        reason = str(error)
        if isinstance(error, AuthenticationError) or "AuthenticationError" in str(error.__cause__):
            reason = (
                "it asks for a token, and this process has none or another one: set RAY_AUTH_MODE=token, and see "
                "docs/clusters.md for where the token comes from"
            )
        raise ConfigError(f"cannot attach to the Ray cluster at RAY_ADDRESS={address}: {reason}") from None


def check_room(asked: Demand) -> None:
    """Before anything is placed. Where an autoscaler may add nodes, the deadlines of placing are left to find out.

    Raises:
        PlacementError: the cluster can never hold it.
    """
    missing = what_is_missing(asked, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    if missing and (largest := state.get_max_resources_from_cluster_config()):
        missing = what_is_missing(asked, [largest])  # as if that were one node: what does not fit there never will
    elif missing and _autoscales():
        missing = None
    if missing:
        raise PlacementError(f"the cluster can never hold this run: {missing}. It asks for {asked}")


def _autoscales() -> bool:
    """Whether Ray's first autoscaler may add nodes. There is no public answer: the types of nodes that it tells of are
    those it may make, or, without one, "node_<id>" of the nodes that are there."""
    status = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    report = json.loads(status).get("autoscaler_report") if status else None
    types = {**(report["active_nodes"] or {}), **(report["idle_nodes"] or {})} if report else {}
    return any(not name.startswith("node_") for name in types)


def there_is() -> str:
    """What the cluster has, and what of it is free, for messages."""
    kinds = {"CPU": 0.0, "GPU": 0.0}
    return (
        f"the cluster has {counts(kinds | ray.cluster_resources())}, "
        f"free now {counts(kinds | ray.available_resources())}"
    )


def without_room(asked: Demand) -> bool:
    """Whether Ray looks in vain for room for the ranks. Ray Train's groups have no name: anybody's of the same bundles
    is taken for theirs."""
    return any(
        group["state"] == "PENDING"
        and group["stats"]["scheduling_state"] in ("NO_RESOURCES", "INFEASIBLE")
        and group["strategy"] == "PACK"
        and list(group["bundles"].values()) == [asked.rank] * asked.ranks
        for group in placement_group_table().values()
    )


def own_seat() -> Seat:
    """Where Ray has put this process."""
    context = ray.get_runtime_context()
    return Seat(node=context.get_node_id(), gpus=tuple(sorted(context.get_accelerator_ids().get("GPU", []))))
