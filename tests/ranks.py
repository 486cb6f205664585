"""Several ranks on one machine: each its own process with one thread, joined over gloo."""

import os
import tempfile
from collections.abc import Callable

import torch
import torch.multiprocessing as mp
from torch import distributed

# One process imports these, and ranks are forked from it: imports would take most of their time.
mp.get_context("forkserver").set_forkserver_preload(
    ["qurl_ray.learner.learner", "qurl_ray.learner.deepspeed_backend", "qurl_ray.learner.fsdp_backend"]
)


def run_ranks(ranks: int, function: Callable, *args) -> None:
    """`function(rank, ranks, *args)` in `ranks` processes. An exception in one ends all and is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        start = (ranks, f"file://{folder}/store", function, args)
        mp.start_processes(_rank, start, nprocs=ranks, start_method="forkserver")


def _rank(rank: int, ranks: int, store: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)  # as Ray Train sets it; DeepSpeed insists
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    function(rank, ranks, *args)
    distributed.barrier()  # nobody leaves while another still talks to it
    # Without Python's shutdown: gloo's threads outlive the group where DeepSpeed holds on to it, and one that wants
    # the interpreter while it goes down aborts the process.
    os._exit(0)
