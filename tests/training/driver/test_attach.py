"""A job that is to attach to a cluster which is not there, or not for it: a clear error, soon."""

import socket
import threading
from contextlib import ExitStack, suppress

import pytest
import ray

from qurl_ray.actors import cluster as cluster_module
from qurl_ray.actors.cluster import attach, check_address
from qurl_ray.errors import ConfigError
from tests.training.runs import SMALL, start_job


@pytest.fixture
def deaf_address():
    """Where nothing listens, nor will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def stranger():
    """Start a server that is no Ray: it gives every connection an answer, b"" closes it, None lets it wait."""
    with ExitStack() as stack:

        def start(answer: bytes | None) -> str:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                with suppress(OSError):  # closed at the end of the test
                    while True:
                        connection = stack.enter_context(listening.accept()[0])
                        if answer is not None:
                            with connection:
                                connection.sendall(answer)

            threading.Thread(target=serve, daemon=True).start()
            return f"127.0.0.1:{listening.getsockname()[1]}"

        yield start


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


@pytest.mark.parametrize("address", ["", "auto", "local", "ray://head"])
def test_addresses_without_a_port_are_left_to_ray(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    check_address()


@pytest.mark.parametrize("address", ["nosuchhost.invalid:6379", "ray://nosuchhost.invalid:10001"])
def test_a_host_that_does_not_resolve_is_an_error_at_once(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"no Ray cluster answers at RAY_ADDRESS={address} "):
        check_address()


@pytest.mark.parametrize("address", ["nosuchhost", ":6379", "head:", "http://head:8265"])
def test_what_is_no_address_is_an_error_at_once(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS={address} is no address of a Ray cluster, such as"):
        check_address()


@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"])
def test_what_listens_and_is_no_ray_is_an_error_that_names_the_address(monkeypatch, stranger, answer, scheme):
    """One that says nothing, one that closes at once, and one that speaks HTTP."""
    address = scheme + stranger(answer)
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(cluster_module, "_ANSWER_S", 1.0)
    with pytest.raises(ConfigError, match=rf"what listens at RAY_ADDRESS={address} is no Ray cluster.* within 1 s"):
        attach()


@pytest.mark.ray
def test_a_cluster_that_is_there_is_one(monkeypatch, cluster):
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    check_address()


def test_a_job_says_so_and_leaves_nothing(tmp_path, deaf_address):
    assert "error: no Ray cluster answers at" in job_at(deaf_address, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.ray
def test_a_job_without_the_token_is_told_what_is_missing(tmp_path, cluster):
    address = ray.get_runtime_context().gcs_address
    said = job_at(address, tmp_path, RAY_AUTH_MODE="disabled", RAY_gcs_server_port_wait_time_s="1")
    assert f"error: cannot attach to the Ray cluster at RAY_ADDRESS={address}: it asks for a token" in said
