"""Commands to the job that serves."""

import contextlib
import os
import socket
import threading

import pytest

from qurl_ray.errors import ConfigError
from qurl_ray.serving import control
from qurl_ray.serving.control import ask_to_swap, listening


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(control.tempfile, "gettempdir", lambda: str(tmp_path))


def swap(policy: str) -> str:
    if policy == "broken":
        raise ConfigError("broken was refused")
    return f"now {policy}"


def test_a_swap_is_asked_for_and_answered():
    with listening(1234, swap):
        assert ask_to_swap(1234, "better", timeout_s=5) == "now better"
        with pytest.raises(ConfigError, match="broken was refused"):
            ask_to_swap(1234, "broken", timeout_s=5)
        with pytest.raises(ConfigError, match="no serving job of this user listens on port 1235"):
            ask_to_swap(1235, "better", timeout_s=5)
    with pytest.raises(ConfigError, match="no serving job of this user"):
        ask_to_swap(1234, "better", timeout_s=5)


def test_a_job_that_does_not_answer_is_not_waited_for_for_ever():
    wakes = threading.Event()
    with listening(1234, lambda _: str(wakes.wait(10))):
        with pytest.raises(ConfigError, match="timed out"):
            ask_to_swap(1234, "better", timeout_s=0.2)
        wakes.set()


def test_who_connects_and_says_nothing_is_in_nobodys_way(monkeypatch):
    monkeypatch.setattr(control, "_READ_S", 600.0)  # whoever waits for it exceeds the limit of this test
    with socket.socket(socket.AF_UNIX) as idle, listening(1234, swap):
        idle.connect(str(control._path(1234)))
        assert ask_to_swap(1234, "better", timeout_s=100) == "now better"
    monkeypatch.setattr(control, "_READ_S", 0.1)
    with socket.socket(socket.AF_UNIX) as idle, listening(1234, swap):
        idle.connect(str(control._path(1234)))
        idle.settimeout(100)
        assert idle.recv(1) == b"", "it is kept open"


@pytest.mark.parametrize("sent", [b"\n", b"[]\n", b"{}\n", b"\xff\n", b"1" * 100_000])
def test_what_is_no_command_is_not_answered(sent, capfd):
    with listening(1234, swap), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(str(control._path(1234)))
        connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert capfd.readouterr().err == ""


def test_a_swap_that_fails_in_ray_is_told_of():
    def fails(policy: str) -> str:
        raise RuntimeError(f"no replica has loaded {policy}")

    with listening(1234, fails), pytest.raises(ConfigError, match="RuntimeError: no replica has loaded better"):
        ask_to_swap(1234, "better", timeout_s=5)


def test_nobody_else_can_open_the_socket(tmp_path):
    with listening(1234, swap):
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="can be read by other users"), listening(1234, swap):
        pass
    os.rmdir(folder)


def test_a_socket_that_was_left_behind_is_replaced():
    with listening(1234, swap):
        pass
    (control._path(1234)).touch()
    with listening(1234, swap):
        assert ask_to_swap(1234, "better", timeout_s=5) == "now better"
