"""Deploy the app on a Ray cluster, swap it to another policy, and remove it when its requests have ended."""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from qurl_ray.actors.cluster import attach, start
from qurl_ray.config.load import runs_folder
from qurl_ray.config.serving import API_KEY, ServingConfig, is_loopback
from qurl_ray.errors import ConfigError, DeadlineExceeded
from qurl_ray.serving.http import digest
from qurl_ray.serving.policies import Pinned, pin, tracking_uri
from qurl_ray.serving.record import AppRecord, recorded
from qurl_ray.serving.replica import ReplicaDeployment
from qurl_ray.signals import StopRequests

logger = logging.getLogger(__name__)

APP = "qurl"
_SPARE = 96  # requests beyond slots and queue that a replica accepts, to reject them with OpenAI's errors
_WITHOUT_REPLICA = 1024  # requests that a proxy queues while no replica accepts any; it rejects more with its own 429
_ASK_S = 5.0
_PAUSE_S = 0.2
_MARGIN_S = 5.0  # time for Serve to notice that a replica has nothing left to do
_KEEP_ALIVE_S = 75
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
_RAY = {"namespace": "serve", "log_to_driver": False, "logging_level": "ERROR"}


def application(config: ServingConfig, pinned: Pinned, *, name: str) -> serve.Application:
    """Return the app that serves a pinned policy under a name.

    The key is read from the environment of this process. Replicas get only its digest.

    Raises:
        ConfigError: as api_key.
    """
    key = api_key(config)
    threads = config.threads or max(1, (os.cpu_count() or 1) // config.most_replicas)
    places = {"output_dir": str(runs_folder(config.output_dir)), "mlflow_uri": tracking_uri(config)}  # with a password
    settings = config.model_dump(mode="json") | places
    arguments = {"name": name, "key_digest": digest(key) if key else None, "threads": threads}
    scale: dict[str, Any] = {"num_replicas": config.replicas}
    if config.most_replicas > config.replicas:
        scale = {
            "autoscaling_config": {
                "min_replicas": config.replicas,
                "max_replicas": config.most_replicas,
                "target_ongoing_requests": config.slots,
            }
        }
    return ReplicaDeployment.options(
        # Else Serve treats each deployment as new code, and restarts replicas even if only the policy changes.
        _internal=True,
        version=hashlib.sha256(
            json.dumps([settings | {"policy": None, "adapters": {}}, arguments]).encode()
        ).hexdigest()[:16],
        user_config=asdict(pinned),
        ray_actor_options={"num_cpus": threads},
        max_ongoing_requests=config.slots + config.queue + _SPARE,
        max_queued_requests=_WITHOUT_REPLICA,
        health_check_period_s=2.0,
        health_check_timeout_s=config.silent_s,
        max_constructor_retry_count=2,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.drain_s,
        logging_config=_LOGGING,
        **scale,
    ).bind(settings, **arguments)


def api_key(config: ServingConfig) -> str | None:
    """Return the key that clients must send, from the environment, without blanks and newlines around it; or None.

    Raises:
        ConfigError: no HTTP header can carry the key, or there is none and other machines could send requests.
    """
    key = os.environ.get(API_KEY, "")
    if key and not re.fullmatch(r"[!-~]+", key.strip()):
        raise ConfigError(f"the API key in ${API_KEY} must be of visible ASCII characters, without blanks")
    config.check_host(key=bool(key))
    return key.strip() or None


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """An app on the cluster that this process is attached to."""

    config: ServingConfig
    name: str
    """Name of the model for clients, whatever the policy is."""

    def deploy(self, pinned: Pinned) -> None:
        """Deploy the app with this policy, and wait until all replicas run.

        Raises:
            ConfigError: the replicas could not load the policy.
        """
        try:
            serve.run(application(self.config, pinned, name=self.name), name=APP, route_prefix="/")
        except (RuntimeError, RayServeException) as error:
            app = serve.status().applications.get(APP)
            told = [deployment.message for deployment in app.deployments.values()] if app else []
            reason = _reason("\n".join([str(error), *told]))
            raise ConfigError(f"{pinned.source} cannot be served: {reason}") from None

    def swap(self, policy: str | None, adapters: dict[str, str]) -> str:
        """Swap all replicas to `policy` with these adapters beside it, given as in the settings, and return a message.
        Requests continue to be answered, each with one policy and adapter. None keeps the policy.

        Raises:
            ConfigError: the policy was refused; all replicas continue with the old one.
            DeadlineExceeded: the policy was not loaded within start_timeout_s.
        """
        began = time.monotonic()
        before = next((status["pinned"] for status in self.statuses()), None)
        pinned = pin(self.config.model_copy(update={"policy": policy, "adapters": adapters}))
        if policy is None and before:
            pinned = replace(Pinned(**before), adapters=pinned.adapters)
        self.deploy(pinned)
        while not (statuses := self.statuses()) or any(status["pinned"] != asdict(pinned) for status in statuses):
            if before and (refused := next((status["refused"] for status in statuses if status["refused"]), None)):
                self.deploy(Pinned(**before))  # the policy that a restarted replica would load
                source = before["source"]
                raise ConfigError(f"{pinned.source} could not be loaded, so {source} still answers: {refused}")
            if time.monotonic() > began + self.config.start_timeout_s:
                raise DeadlineExceeded(
                    f"waited {self.config.start_timeout_s:g} s for the replicas to load {pinned.source}"
                )
            time.sleep(_PAUSE_S)
        return f"{self.name} now uses the policy {pinned.source} ({time.monotonic() - began:.1f} s)"

    def record(self) -> AppRecord:
        """Return what another process needs to swap the app."""
        environment = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        if mode := os.environ.get("RAY_AUTH_MODE"):  # a Ray that was started here asks for this user's token
            environment["RAY_AUTH_MODE"] = mode
        return AppRecord(name=self.name, settings=self.config.model_dump(mode="json"), environment=environment)

    def statuses(self) -> list[dict[str, Any]]:
        """Return the statuses of all replicas that are up; see Service.status."""
        try:
            return serve.get_app_handle(APP).broadcast("status").results(timeout_s=_ASK_S)
        except (RayError, RayServeException, TimeoutError):  # none is up, or one has just died
            return []

    def end(self, wait_s: float) -> None:
        """Remove the app, and wait for its requests to end: serve.shutdown would close their connections.

        Says so if Ray Serve had to abort some, which it does after `drain_s`.
        """
        began = time.monotonic()
        while app := serve.status().applications.get(APP):
            if app.status != ApplicationStatus.DELETING:  # also if a swap has deployed it again meanwhile
                serve.delete(APP, _blocking=False)
            if time.monotonic() > began + wait_s:
                break
            time.sleep(_PAUSE_S)
        if self.config.drain_s < time.monotonic() - began:
            logger.warning("requests that had not ended after drain_s=%g s were aborted", self.config.drain_s)


@contextmanager
def running(config: ServingConfig, stops: StopRequests) -> Iterator[Pinned]:
    """Run the app, on the cluster of $RAY_ADDRESS or a Ray of its own, and yield its policy. At the end requests in
    flight may finish, until `stops` gets a second request to stop.

    Raises:
        QurlError: the policy cannot be found or loaded, or the port is taken.
    """
    pinned = pin(config)
    api_key(config)
    try:
        with stops.kept():
            if os.environ.get("RAY_ADDRESS"):
                attach(**_RAY)
            else:
                cpus = max(os.cpu_count() or 1, config.most_replicas * (config.threads or 1))
                start(num_cpus=cpus, include_dashboard=False, **_RAY)
        _start_serve(config)
        app = App(config=config, name=config.name or pinned.name)
        try:
            app.deploy(pinned)
            with recorded(config.port, app.record()):
                yield pinned
        finally:
            stops.raising = len(stops.signals) < 2
            app.end(config.drain_s + _MARGIN_S if stops.raising else 0.0)
            stops.raising = False
    finally:
        ray.shutdown()  # ends a Ray of its own with all that runs in it; on a cluster, others may use Ray Serve


def metrics_address() -> str:
    """Return the address of the page that this node's agent of Ray has for Prometheus. Each node has one."""
    here = next(node for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id())
    return f"http://{here['NodeManagerAddress']}:{here['MetricsExportPort']}/metrics"


def swap(record: AppRecord, policy: str | None, adapters: dict[str, str]) -> str:
    """Swap a recorded app, from another process than the one that runs it. See App.swap."""
    attach(**_RAY)
    try:
        return App(config=ServingConfig.model_validate(record.settings), name=record.name).swap(policy, adapters)
    except (RayError, RayServeException) as error:
        raise ConfigError(f"the swap failed: {_reason(str(error))}") from None
    finally:
        ray.shutdown()


def _start_serve(config: ServingConfig) -> None:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        serve.start(
            proxy_location="HeadOnly" if is_loopback(config.host) else "EveryNode",
            # Longer than clients keep connections: else they could send a request into one that is being closed.
            http_options={"host": config.host, "port": config.port, "keep_alive_timeout_s": _KEEP_ALIVE_S},
            logging_config=_LOGGING,
        )
    except (RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {_reason(str(error))}") from None


def _reason(text: str) -> str:
    """Return the last line with `Error`, else the last line, of an error that passed through several processes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no reason was given")
