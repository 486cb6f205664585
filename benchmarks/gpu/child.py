"""Functions and jobs in processes of their own: python -m benchmarks.gpu.child WORK RESULT is one of them.

vLLM patches torch, a process can hold only one of its engines, and what a process holds of a GPU is free when it has
ended.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the function imports what it needs
    from benchmarks.gpu.bench import Bench

_ROOT = Path(__file__).parents[2]
_ENDS_S = 20.0
"""Time that a process has to end by itself before it is killed."""


def call(bench: "Bench", function: Callable[..., Any], **arguments: Any) -> Any:
    """Return what a function of a module returns in a process of its own. Arguments and result are plain, as in JSON.

    Raises:
        RuntimeError: it failed there.
        TimeoutError: it took longer than is left of the part.
    """
    work = {"module": function.__module__, "name": function.__name__, "arguments": arguments}
    with tempfile.TemporaryDirectory(prefix="qurl-kit-") as folder:
        result = Path(folder, "result.json")
        run(bench, ["-m", __name__, json.dumps(work), str(result)], until=result.exists)
        found = json.loads(result.read_text())
    if "failed" in found:
        raise RuntimeError(found["failed"])
    return found["returned"]


def run(bench: "Bench", arguments: Sequence[str], *, until: Callable[[], bool]) -> None:
    """Run Python with these arguments until `until` is true, and end it then, with all that it has started. What it
    prints is added to the bench's log.

    Raises:
        RuntimeError: it ended before.
        TimeoutError: it took longer than is left of the part.
    """
    bench.free()
    paths = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own
    limit, started = bench.left_of_part(), time.monotonic()
    with bench.log.open("a+") as log:
        start = log.tell()
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=_ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while not until() and process.poll() is None:
                if time.monotonic() - started > limit:
                    raise TimeoutError(f"not done after the {limit:.0f} s that were left of the part")
                time.sleep(0.05)
        finally:
            _end(process)
        if not until():
            log.seek(start)
            lines = log.read().strip().splitlines() or [f"exit status {process.returncode}"]
            raise RuntimeError(f"{lines[-1]} ({bench.log} has the rest)")


def _end(process: subprocess.Popen) -> None:
    """Ask a process to end, then kill it and what is left of its group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_ENDS_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(work: str, result: str) -> None:
    """Call the function, and write its result as a whole."""
    asked = json.loads(work)
    try:
        found = {"returned": getattr(import_module(asked["module"]), asked["name"])(**asked["arguments"])}
    except Exception as error:
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {error}"}
    new = Path(result).with_suffix(".new")
    new.write_text(json.dumps(found))
    new.replace(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
