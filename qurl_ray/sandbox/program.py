"""Running one program of a policy without network and signals, and with limits; nothing is left of it afterwards.

The kernel refuses calls by number (seccomp, Linux): no socket can be made, no process be signalled or traced. Files are
those of the user: what the user may read or write, the program may.
"""

import ctypes
import errno
import math
import os
import platform
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from qurl_ray.sandbox.descendants import adopt_orphans, descendants, kill_descendants

_FORBIDDEN = {
    "x86_64": (41, 62, 101, 129, 200, 234, 297, 311, 424, 425),
    "aarch64": (198, 129, 117, 138, 130, 131, 240, 271, 424, 425),
}
"""Numbers of socket, kill, ptrace, rt_sigqueueinfo, tkill, tgkill, rt_tgsigqueueinfo, process_vm_writev,
pidfd_send_signal and io_uring_setup (asm/unistd.h)."""
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
_OTHER_ABI = 0x40000000  # first number of x32's calls, the same ones under other numbers
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM  # linux/seccomp.h
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_FILE_BYTES = 16 << 20

SUPPORTED = sys.platform == "linux" and platform.machine() in _FORBIDDEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A program that has ended."""

    output: str
    """Beginning of what it wrote to its two standard streams."""
    cut: bool
    """True if it wrote more."""
    code: int | None
    """Exit code, negative for a signal; None if it was killed at its deadline."""


def run_program(
    command: Sequence[str], *, timeout_s: float, memory_bytes: int, most_characters: int, env: dict[str, str]
) -> Ran:
    """Run a program in an empty folder, and kill all that it started when it ends or at the deadline. Calls must not
    overlap.

    Args:
        memory_bytes: limit of private memory of each of its processes.

    Raises:
        OSError: it cannot be started under the limits; not on this system, for example.
    """
    if not SUPPORTED:
        raise OSError("programs of a policy run only on Linux, on x86-64 and arm64: elsewhere nothing holds them")
    adopt_orphans()
    others = descendants(os.getpid())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as out:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(_set_limits, cpu_s=math.ceil(timeout_s) + 1, memory_bytes=memory_bytes),
            )
        except subprocess.SubprocessError as error:
            raise OSError(f"the limits of a program cannot be set here: {error}") from error
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
            kill_descendants(keep=others)
        out.seek(0)
        text = out.read(4 * most_characters + 1).decode(errors="replace")
    return Ran(output=text[:most_characters], cut=len(text) > most_characters, code=code)


def _set_limits(*, cpu_s: int, memory_bytes: int) -> None:
    """Set the limits of this process, which is new, before its program begins."""
    for limit, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_DATA, memory_bytes),
    ):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    refuse_calls(_FORBIDDEN[platform.machine()])


def refuse_calls(numbers: Sequence[int]) -> None:
    """Let the kernel refuse these calls of this process, and of all that it starts, with EPERM. There is no way back.

    Raises:
        OSError: the kernel has no such filters, or one of this process forbids to set them.
    """
    last = len(numbers) + 5  # place of the refusal
    program = [
        (_LOAD, 0, 0, 4),  # architecture
        (_IF_EQUAL, 0, last - 2, _ARCHITECTURE[platform.machine()]),
        (_LOAD, 0, 0, 0),  # number of the call
        (_IF_AT_LEAST, last - 4, 0, _OTHER_ABI),
        *((_IF_EQUAL, last - 5 - place, 0, number) for place, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    pointer = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, first, second in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, 2, ctypes.addressof(pointer))):
        if libc.prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "seccomp")
