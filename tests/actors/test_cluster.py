"""The start of a Ray on this machine."""

import os
from types import SimpleNamespace

import pytest
import ray

from qurl_ray.actors import cluster
from qurl_ray.errors import ConfigError


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no port\nis free"), OSError(28, "No space left"), ValueError("bad"), TimeoutError("10 s")],
    ids=lambda error: type(error).__name__,
)
def test_every_failure_of_rays_start_is_one_line_of_ours(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ConfigError, match=f"Ray cannot be started here: {type(error).__name__}: ") as caught:
        cluster.start(num_cpus=1)
    assert "\n" not in str(caught.value)


def test_an_interrupted_start_stays_an_interrupt(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cluster.start(num_cpus=1)


def test_a_start_that_is_late_on_a_busy_machine_is_tried_again(monkeypatch):
    """Ray gives its processes 30 seconds, which cannot be set."""
    late = "The current node timed out during startup. This could happen because the GCS has become overloaded."
    starts = []

    def init(*_, **settings):
        starts.append(settings)
        if len(starts) < 3:
            raise Exception(late)
        return SimpleNamespace(dashboard_url="127.0.0.1:8265")

    monkeypatch.setattr(ray, "init", init)
    assert cluster.start(num_cpus=1) == "127.0.0.1:8265"
    assert starts == [{"num_cpus": 1}] * 3
    monkeypatch.setattr(cluster, "_STARTS", 1)
    starts.clear()
    with pytest.raises(ConfigError, match="timed out during startup"):
        cluster.start(num_cpus=1)


def test_the_longest_folder_is_the_one_whose_sockets_have_107_bytes(monkeypatch, tmp_path):
    """/ray/session_2026-01-31_12-00-00_123456_<pid>/sockets/plasma_store has 60 characters and those of the pid."""
    monkeypatch.setattr(cluster, "why_unwritable", lambda folder: "")
    monkeypatch.setattr(cluster, "_LONGEST_SOCKET", 107)
    longest = 107 - 61 - len(str(os.getpid()))
    monkeypatch.setenv("TMPDIR", "/" + "t" * (longest - 1))
    cluster.check_folder()
    monkeypatch.setenv("TMPDIR", "/" + "t" * longest)
    with pytest.raises(ConfigError, match="would be 1 bytes longer"):
        cluster.check_folder()
