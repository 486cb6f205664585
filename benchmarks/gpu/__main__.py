"""python -m benchmarks.gpu: see the package's docstring and docs/clusters.md."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.gpu.bench import FULL, TINY, Bench

PARTS = {"kernels": 0.2, "unified": 0.2, "step": 0.35, "rollout": 1.0}
"""Parts in their order, each with its share of the time that is left when it begins."""


def run(name: str, bench: Bench) -> None:
    """Import a part and run it. It is imported only here, so that a failed import is a failure of this part alone."""
    import_module(f"benchmarks.gpu.{name}").run(bench)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the parts, print the results, and write the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="one part, with all of the time")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which nothing more is begun (9)")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the file of figures (gpu.json)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu checks the kit, with --tiny")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: does it all run? Seconds, and no figures")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu is for checking the kit itself: add --tiny")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("not measured: no CUDA device")
    scale = TINY if options.tiny else FULL
    bench = Bench(device=options.device, scale=scale, minutes=options.minutes, out=options.out)
    bench.say(" · ".join(f"{key} {value}" for key, value in bench.figures["machine"].items()))
    for name, share in PARTS.items():
        if options.only in (None, name):
            bench.part(name, 1.0 if options.only else share, partial(run, name))
    troubles = [f"{len(bench.figures[kind])} {kind}" for kind in ("errors", "skipped") if bench.figures[kind]]
    bench.say(f"figures are in {options.out}" + (f"; {' and '.join(troubles)}, listed there" if troubles else ""))


if __name__ == "__main__":
    main()
