"""Programs of the policy: what they print comes back, and nothing else of them is left or gets out."""

import os
import socket
import sys

import pytest

from qurl_ray.sandbox.descendants import descendants
from qurl_ray.sandbox.program import SUPPORTED
from qurl_ray.tools.python import Python

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="programs of a policy run on Linux only")


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = set(descendants(os.getpid()))
    yield
    assert set(descendants(os.getpid())) <= before


@pytest.fixture(scope="module")
def python():
    return Python(timeout_s=10)


def test_what_a_program_prints_comes_back(python):
    assert python("print(6 * 7)") == "42"
    assert python("import sys; print('é', file=sys.stderr)") == "é"
    assert python("x = 1") == ""
    assert python("import numpy; print(numpy.arange(3).sum())") == "3"


def test_errors_and_exit_codes_are_told(python):
    told = python("1 / 0")
    assert "ZeroDivisionError: division by zero" in told
    assert told.endswith("(exit code 1)")
    assert python("raise SystemExit(7)") == "(exit code 7)"


def test_a_program_that_hangs_is_stopped():
    assert Python(timeout_s=0.5)("print('here', flush=True)\nwhile True: pass") == "here\n(stopped after 0.5 s)"


def test_output_is_cut(python):
    told = Python(most_characters=10, timeout_s=10)("print('é' * 100)")
    assert told == "é" * 10 + "\n(cut here)"


def test_a_flood_ends_at_the_limit_of_files():
    told = Python(timeout_s=10, most_characters=50)("import sys\nwhile True: sys.stdout.write('x' * 65536)")
    assert told.startswith("x" * 50 + "\n(cut here)")
    assert "stopped" not in told


def test_memory_is_bounded(python):
    assert "MemoryError" in python("x = bytearray(1 << 30)")


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.create_connection(('127.0.0.1', {port}))",
        "import os; os.kill({parent}, 0)",
        "import os, signal; os.kill(-1, 0)",
        "import signal, os; signal.pidfd_send_signal(os.pidfd_open({parent}), 0)",
        "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'import socket; socket.socket()'],"
        " capture_output=True, text=True).stderr)",
    ],
)
def test_no_program_reaches_the_network_or_other_processes(python, program):
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = python(program.format(port=server.getsockname()[1], parent=os.getpid()))
        server.settimeout(0.01)
        with pytest.raises(TimeoutError):
            server.accept()
    assert "PermissionError" in told


def test_processes_that_outlive_their_program_are_ended(python):
    escapes = "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  time.sleep(600)\n os._exit(0)"
    assert python(escapes) == ""  # the fixture looks for what is left


def test_threads_and_children_work(python):
    many = "from concurrent.futures import ThreadPoolExecutor as P; import subprocess, sys\n"
    many += "print(sum(P(4).map(len, ['a'] * 9)), subprocess.run([sys.executable, '-c', 'print(5)'],"
    many += " capture_output=True, text=True).stdout)"
    assert python(many).split() == ["9", "5"]


def test_a_program_sees_neither_variables_nor_the_folder_of_the_run(python, monkeypatch):
    monkeypatch.setenv("QURL_API_KEY", "secret")
    assert python("import os; print('QURL_API_KEY' in os.environ, os.listdir('.'))") == "False []"


@pytest.mark.parametrize("code", ["print(1)\0", "x" * (1 << 18)])
def test_a_program_that_cannot_be_started_is_an_error(python, code):
    with pytest.raises((ValueError, OSError)):
        python(code)


def test_python_is_this_one(python):
    assert python("import sys; print(sys.version)") == sys.version
