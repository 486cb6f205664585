"""A tool that runs programs of the policy in Python."""

import os
import sys
import tempfile

from qurl_ray.sandbox.program import run_program

_COMMAND = (sys.executable, "-I", "-X", "utf8", "-c")
"""A Python with the packages of this one, and nothing of the user's."""


class Python:
    """Runner of programs, each in a process of its own (sandbox.program).

    Args:
        timeout_s: deadline of a program, in seconds.
        memory_mb: private memory of each of its processes, in MiB.
        most_characters: characters of its output that are returned.
    """

    def __init__(self, *, timeout_s: float = 5.0, memory_mb: int = 512, most_characters: int = 2000) -> None:
        self._timeout_s, self._memory_bytes, self._most = timeout_s, memory_mb << 20, most_characters

    def __call__(self, code: str) -> str:
        """Run a program in Python and return what it prints.

        Args:
            code: The program. It has no network, and keeps nothing between two calls.
        """
        env = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "HOME": tempfile.gettempdir()}
        ran = run_program(
            [*_COMMAND, code],
            timeout_s=self._timeout_s,
            memory_bytes=self._memory_bytes,
            most_characters=self._most,
            env=env,
        )
        notes = ["(cut here)"] if ran.cut else []
        if ran.code is None:
            notes.append(f"(stopped after {self._timeout_s:g} s)")
        elif ran.code:
            notes.append(f"(exit code {ran.code})")
        return "\n".join([ran.output.rstrip("\n"), *notes] if ran.output else notes)
