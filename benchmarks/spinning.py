"""Products of two OpenMP threads beside busy processes: python benchmarks/spinning.py (a minute), on two cores.

Between two operations, OpenMP's threads wait in a loop before they sleep. `GOMP_SPINCOUNT` says how often they look.
With the default, a thread may loop through its whole time slice while the one that it waits for does not run. Each
figure is the median of several processes. Writes benchmarks/results/spinning.md.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from shared import RESULTS, machine

COUNTS = {
    "default": {},
    **{str(count): {"GOMP_SPINCOUNT": str(count)} for count in (0, 1000, 4000, 10_000, 100_000)},
}
BUSY = (0, 1, 2)


def milliseconds(seconds: float = 3.0) -> float:
    """Return the mean duration of eight products of [512, 256] and [256, 256], each with a silu."""
    import torch

    torch.set_num_threads(2)
    weights, x = [torch.randn(256, 256) for _ in range(8)], torch.randn(512, 256)

    def forward() -> None:
        y = x
        for weight in weights:
            y = torch.nn.functional.silu(y @ weight) * 0.1

    for _ in range(50):
        forward()
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        forward()
        rounds += 1
    return 1e3 * (time.perf_counter() - began) / rounds


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run so many processes that do nothing but compute."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measured(variables: dict[str, str]) -> float:
    """Return `milliseconds` of a process with these environment variables."""
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "from spinning import milliseconds; print(milliseconds())"
    command, here = [sys.executable, "-c", code], RESULTS.parent
    done = subprocess.run(command, env=clean | variables, cwd=here, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main(rounds: Annotated[int, typer.Option(help="Number of rounds; the table has medians.")] = 3) -> None:
    """Measure products beside busy processes, with several values of GOMP_SPINCOUNT."""
    found: dict[tuple[int, str], list[float]] = {}
    for _ in range(rounds):
        for count in BUSY:
            for name, variables in COUNTS.items():
                with busy(count):
                    found.setdefault((count, name), []).append(measured(variables))
    lines = ["# Products of two threads beside busy processes", "", f"`python benchmarks/spinning.py`; {machine()}", ""]
    lines += [f"| busy processes | {' | '.join(f'{name}, ms' for name in COUNTS)} |", "|---" * (1 + len(COUNTS)) + "|"]
    for count in BUSY:
        values = (f"{statistics.median(found[count, name]):.1f}" for name in COUNTS)
        lines.append(f"| {count} | {' | '.join(values)} |")
    text = "\n".join([*lines, ""])
    (RESULTS / "spinning.md").write_text(text)
    print(text)


if __name__ == "__main__":
    typer.run(main)
