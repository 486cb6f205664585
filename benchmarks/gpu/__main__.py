"""python -m benchmarks.gpu: see the package's docstring and docs/gpu.md."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.gpu.bench import FULL, TINY, Bench
from benchmarks.gpu.page import page
from qurl_ray.errors import ConfigError

PARTS = {
    "runs": 12,
    "kernels": 2,
    "unified": 2,
    "gradients": 2,
    "step": 3,
    "rollout": 2,
    "codes": 2,
    "vllm": 7,
    "loads": 4,
    "sleeps": 2,
    "sync": 3,
    "training": 4,
}
"""Parts in their order, each with its minutes of 45. What a part leaves is divided among those after it."""


def run(name: str, bench: Bench) -> None:
    """Import a part and run it. It is imported only here, so that a failed import is a failure of this part alone."""
    import_module(f"benchmarks.gpu.{name}").run(bench)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the parts, print the results, and write the figures as JSON and as a page with pictures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="one part, for up to 10 minutes")
    parser.add_argument("--minutes", type=float, default=45.0, help="after which nothing more is begun (45)")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="file of figures (gpu.json); page and log "
                        "go beside it. What it holds already is not measured again")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="measure everything again, and replace the file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu checks the kit, with --tiny")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: does it all run? Minutes, and no figures")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu is for checking the kit itself: add --tiny")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("not measured: no CUDA device")
    scale = TINY if options.tiny else FULL
    try:
        bench = Bench(device=options.device, scale=scale, minutes=options.minutes, out=options.out, fresh=options.fresh)
    except ConfigError as error:
        sys.exit(str(error))
    bench.say(" · ".join(f"{key} {value}" for key, value in bench.figures["machine"].items()))
    left = [name for name in PARTS if options.only in (None, name) and not bench.complete(name)]
    html = options.out.with_suffix(".html")
    try:
        for at, name in enumerate(left):
            bench.part(name, PARTS[name] / sum(PARTS[one] for one in left[at:]), partial(run, name))
    finally:
        html.write_text(page(bench.figures), encoding="utf-8")
    troubles = [f"{len(bench.figures[kind])} {kind}" for kind in ("errors", "skipped") if bench.figures[kind]]
    bench.say(f"figures: {options.out}, {html}" + (f"; {' and '.join(troubles)}, listed there" if troubles else ""))


if __name__ == "__main__":
    main()
