"""MLflow's own server, for tests that need a real one."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


class Server:
    """`mlflow server` on a free port; its database stays while it is away."""

    def __init__(self, folder: Path, store: str | None = None):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder, self._store = folder, store or f"sqlite:///{folder}/server.db"
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", self._store]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        with (self._folder / "server.log").open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                    return
            except OSError:
                assert time.monotonic() < deadline, (self._folder / "server.log").read_text()
                time.sleep(0.2)

    def kill(self) -> None:
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)  # its session: uvicorn's processes too
            self._process.wait()
            self._process = None
