"""A job that is to attach to a cluster which is not there, or not for it: a clear error, soon."""

import socket

import pytest
import ray

from qurl_ray.actors.cluster import attach, check_address
from qurl_ray.errors import ConfigError
from tests.loop.runs import SMALL, start_job


@pytest.fixture
def deaf_address():
    """Where nothing listens, nor will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def job_at(address: str, output_dir, **environment: str) -> str:
    """What a job says that is refused."""
    job = start_job(*SMALL, "steps=1", f"output_dir={output_dir}", address=address, **environment)
    try:
        said, _ = job.communicate(timeout=120)
    finally:
        job.kill()  # if it was late
    assert job.returncode == 2, said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_is_an_error_at_once(monkeypatch, deaf_address, scheme):
    address = scheme + deaf_address
    monkeypatch.setenv("RAY_ADDRESS", address)
    for ask in (check_address, attach):
        with pytest.raises(ConfigError, match=f"no Ray cluster answers at RAY_ADDRESS={address} .*refused"):
            ask()


@pytest.mark.parametrize("address", ["", "auto", "local"])
def test_addresses_without_a_port_are_left_to_ray(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    check_address()


def test_a_job_says_so_and_leaves_nothing(tmp_path, deaf_address):
    assert "error: no Ray cluster answers at" in job_at(deaf_address, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.ray
def test_a_job_without_the_token_is_told_what_is_missing(tmp_path, cluster):
    address = ray.get_runtime_context().gcs_address
    said = job_at(address, tmp_path, RAY_AUTH_MODE="disabled", RAY_gcs_server_port_wait_time_s="1")
    assert f"error: cannot attach to the Ray cluster at RAY_ADDRESS={address}: it asks for a token" in said
