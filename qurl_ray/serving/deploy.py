"""Deploy the app on a Ray cluster, swap it to another policy, and remove it when its requests have ended."""

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from qurl_ray.actors.cluster import attach, start
from qurl_ray.config.load import runs_folder
from qurl_ray.config.serving import ServingConfig, is_loopback
from qurl_ray.errors import ConfigError, DeadlineExceeded, QurlError
from qurl_ray.serving.gate import ENVIRONMENT
from qurl_ray.serving.http import MOST_BODIES, digest
from qurl_ray.serving.kept import keep, keep_only, keeping
from qurl_ray.serving.policies import Pinned, pin, tracking_uri
from qurl_ray.serving.replica import ReplicaDeployment
from qurl_ray.signals import StopRequests

logger = logging.getLogger(__name__)

APP = "qurl"
_SPARE = 32  # requests beyond slots, queue and bodies that a replica accepts, to reject them with OpenAI's errors
_WITHOUT_REPLICA = 1024  # requests that a proxy queues while no replica accepts any; it rejects more with its own 429
_ASK_S = 5.0
_PAUSE_S = 0.2
_MARGIN_S = 5.0  # time for Serve to notice that a replica has nothing left to do
_KEEP_ALIVE_S = 75
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}


def application(config: ServingConfig, pinned: Pinned, *, name: str, kept: Path | None = None) -> serve.Application:
    """Return the app that serves a pinned policy under a name.

    The key is read from the environment of this process. Replicas get only its digest.

    Args:
        kept: folder with the policy's files, or links to them; see kept.keep.

    Raises:
        ConfigError: as api_key.
    """
    key = api_key(config)
    threads = config.threads or max(1, (os.cpu_count() or 1) // config.most_replicas)
    places = {"output_dir": str(runs_folder(config.output_dir)), "mlflow_uri": tracking_uri(config)}  # with a password
    settings = config.model_dump(mode="json") | places
    arguments = {
        "name": name,
        "key_digest": digest(key) if key else None,
        "threads": threads,
        "kept": str(kept) if kept else None,
    }
    gpus = config.tensor_parallel if config.device == "cuda" else 0
    scale: dict[str, Any] = {"num_replicas": config.replicas}
    if config.most_replicas > config.replicas:
        scale = {
            "autoscaling_config": {
                "min_replicas": config.replicas,
                "max_replicas": config.most_replicas,
                "target_ongoing_requests": config.slots,
                "upscale_delay_s": config.upscale_after_s,
                "downscale_delay_s": config.downscale_after_s,
            }
        }
    return ReplicaDeployment.options(
        # Else Serve treats each deployment as new code, and restarts replicas even if only the policy changes.
        _internal=True,
        version=hashlib.sha256(json.dumps([settings | {"policy": None}, arguments]).encode()).hexdigest()[:16],
        user_config=asdict(pinned),
        ray_actor_options={"num_cpus": threads, "num_gpus": gpus},
        max_ongoing_requests=config.slots + config.queue + MOST_BODIES + _SPARE,
        max_queued_requests=_WITHOUT_REPLICA,
        backpressure_config={"status_code": 429, "retry_after_s": config.retry_after_s},
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
    key = os.environ.get(config.api_key_env, "")
    if key and not re.fullmatch(r"[!-~]+", key.strip()):
        raise ConfigError(f"the API key in ${config.api_key_env} must be of visible ASCII characters, without blanks")
    config.check_host(key=bool(key))
    return key.strip() or None


@contextmanager
def running(config: ServingConfig, stops: StopRequests) -> Iterator["App"]:
    """Run the app, on the cluster of $RAY_ADDRESS or a Ray of its own. At the end requests in flight may finish, until
    `stops` gets a second request to stop.

    Raises:
        QurlError: the policy cannot be found or loaded, or the port is taken.
    """
    with keeping(runs_folder(config.output_dir)) as kept:
        pinned = pin(config, kept)
        api_key(config)
        try:
            with stops.kept():
                _start_ray(config)
            _start_serve(config)
            app = App(config, pinned, name=config.name or pinned.name, kept=kept)
            try:
                app.deploy(pinned)
                yield app
            finally:
                stops.raising = len(stops.signals) < 2
                app.end(config.drain_s + _MARGIN_S if stops.raising else 0.0)
                stops.raising = False
        finally:
            ray.shutdown()  # ends a Ray of its own with all that runs in it; on a cluster, others may use Ray Serve


class App:
    """A deployed app.

    Args:
        pinned: policy that answers.
        name: name of the model for clients, whatever the policy is.
        kept: folder for the files of policies, if there can be one; see kept.keep.
    """

    def __init__(self, config: ServingConfig, pinned: Pinned, *, name: str, kept: Path | None) -> None:
        self.config, self.pinned, self.name, self._kept = config, pinned, name, kept
        self._swapping = threading.RLock()  # held while a policy is pinned, too: keep_only would remove its files
        self._ending = False

    def deploy(self, pinned: Pinned) -> None:
        """Deploy the app with this policy, and wait until all replicas run.

        Raises:
            ConfigError: the replicas could not load the policy, or the app ends.
        """
        if self._ending:
            raise ConfigError("the app ends, and takes no other policy")
        if self._kept:
            keep(pinned, self._kept)
        try:
            serve.run(application(self.config, pinned, name=self.name, kept=self._kept), name=APP, route_prefix="/")
        except (RuntimeError, RayServeException) as error:
            app = serve.status().applications.get(APP)
            told = [one.message for one in app.deployments.values()] if app else []
            reason = _reason("\n".join([str(error), *told]))
            raise ConfigError(f"{pinned.source} cannot be served: {reason}") from None

    def swap_to(self, policy: str) -> str:
        """Swap to `policy`, given as in the setting, and return a message. Thread-safe. Raises as `swap`."""
        with self._swapping:
            pinned = pin(self.config.model_copy(update={"policy": policy}), self._kept)
            began = time.monotonic()
            self.swap(pinned)
        return f"{self.name} now uses the policy {pinned.source} ({time.monotonic() - began:.1f} s)"

    def swap(self, pinned: Pinned) -> None:
        """Swap all replicas to another policy. Requests continue to be answered, each with one policy.

        Raises:
            ConfigError: the policy was refused; all replicas continue with the old one.
            DeadlineExceeded: the policy was not loaded within start_timeout_s.
        """
        with self._swapping:
            self.deploy(pinned)
            try:
                self._wait_for(pinned)
            except ConfigError:
                self.deploy(self.pinned)  # the policy that a restarted replica would load
                raise
            self.pinned = pinned
            if self._kept:
                keep_only(pinned, self._kept)

    def _wait_for(self, pinned: Pinned) -> None:
        deadline = time.monotonic() + self.config.start_timeout_s
        while unsettled := [one for one in self.statuses() if one["pinned"] != asdict(pinned)]:
            if refused := next((one["refused"] for one in unsettled if one["refused"]), None):
                raise ConfigError(
                    f"{pinned.source} could not be loaded, so {self.pinned.source} still answers: {refused}"
                )
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"waited {self.config.start_timeout_s:g} s for {len(unsettled)} replicas to load {pinned.source}"
                )
            time.sleep(_PAUSE_S)

    def end(self, wait_s: float) -> None:
        """Remove the app, and wait for its requests to end: serve.shutdown would close their connections.

        Says so if Ray Serve had to abort some, which it does after `drain_s`.
        """
        self._ending = True
        began = time.monotonic()
        while app := serve.status().applications.get(APP):
            if app.status != ApplicationStatus.DELETING:  # also if a swap has deployed it again meanwhile
                serve.delete(APP, _blocking=False)
            if time.monotonic() > began + wait_s:
                break
            time.sleep(_PAUSE_S)
        if self.config.drain_s < time.monotonic() - began:
            logger.warning("requests that had not ended after drain_s=%g s were aborted", self.config.drain_s)

    def statuses(self) -> list[dict[str, Any]]:
        """Return the statuses of all replicas; see Service.status."""
        return serve.get_app_handle(APP).broadcast("status").results(timeout_s=_ASK_S)

    def follow(self, every_s: float) -> Iterator[str]:
        """Resolve `config.policy` every `every_s` seconds. If it changed, swap and yield the result. Never ends."""
        newest = self.pinned
        while True:
            time.sleep(every_s)
            try:
                with self._swapping:
                    before, newest = newest, pin(self.config, self._kept, newest)
                    if newest == before:  # also if it was refused: it is not tried again
                        continue
                    self.swap(newest)
                yield f"{self.name} now uses the policy {newest.source}"
            except QurlError as error:
                yield str(error)


def _start_ray(config: ServingConfig) -> None:
    if os.environ.get("RAY_ADDRESS"):
        attach(namespace="serve", log_to_driver=False, logging_level="ERROR")
        return
    threads = config.threads or 1
    cpus = max(os.cpu_count() or 1, config.most_replicas * threads)
    start(num_cpus=cpus, namespace="serve", include_dashboard=False, log_to_driver=False, logging_level="ERROR")


def _start_serve(config: ServingConfig) -> None:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        serve.start(
            proxy_location="HeadOnly" if is_loopback(config.host) else "EveryNode",
            # Longer than clients keep connections: else they could send a request into one that is being closed.
            http_options={"host": config.host, "port": config.port, "keep_alive_timeout_s": _KEEP_ALIVE_S},
            logging_config=_LOGGING,
            controller_options={"runtime_env": {"env_vars": ENVIRONMENT}},  # from which the proxies get it
        )
    except (RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {_reason(str(error))}") from None


def _reason(text: str) -> str:
    """Return the last line with `Error`, else the last line, of an error that passed through several processes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no reason was given")
