"""Colocated engines whose ranks come back on another node. A cluster of its own, so a module of its own."""

import threading
import time

import pytest
import ray
from ray._private.state import available_resources_per_node
from ray.cluster_utils import Cluster

from tests.training.runs import ROOT, events
from tests.training.test_colocated import small_run

pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_engines_follow_ranks_that_come_back_on_another_node(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    both = [nodes.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=nodes.address, log_to_driver=False)
    run_dir = tmp_path / "run"

    def lose_the_ranks_node() -> None:
        while not (run_dir / "metrics.jsonl").is_file() or len(events(run_dir, "step")) < 3:
            time.sleep(0.1)
        free = available_resources_per_node()
        (taken,) = (node for node in both if not free[node.node_id].get("CPU"))
        nodes.remove_node(taken, allow_graceful=False)

    loser = threading.Thread(target=lose_the_ranks_node, daemon=True)
    loser.start()
    try:
        small_run(tmp_path, "placement=colocated", "steps=8", "rollout.silent_s=20")
        assert not loser.is_alive()
    finally:
        ray.shutdown()
        nodes.shutdown()
    assert [line["step"] for line in events(run_dir, "step")] == list(range(1, 9))
    said = [line["message"] for line in events(run_dir, "info")]
    # A coordinator that was on that node as well is made anew, and knows of no worker yet.
    came = ("rollout worker 0 joins the fleet", "rollout worker 0 moves to where the learner's ranks are now")
    assert sum(message in came for message in said) == 2
