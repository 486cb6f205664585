"""Processes of a run are killed while it trains; it ends where the undisturbed one does, to the bit."""

import signal
import time

import pytest
import torch
from ray.cluster_utils import Cluster

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError
from qurl_ray.training.driver.run import run
from tests.training.runs import ROOT, SMALL, descendants, events, parameters, prompts, start_job, strike, wait_for_steps

pytestmark = pytest.mark.ray

SETTINGS = [*SMALL, "steps=12", "checkpoint.every=2", "checkpoint.keep=9", "rollout.max_new_tokens=24"]


def finished(job, run_dir):
    try:
        output, _ = job.communicate(timeout=240)
    finally:
        job.kill()  # if it was late
    assert job.returncode == 0, output[-3000:]
    return parameters(run_dir / "policy"), [line["step"] for line in events(run_dir, "step")], prompts(run_dir)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return finished(start_job(*SETTINGS, f"output_dir={folder}"), folder / "run")


def survivor(folder, undisturbed, *victims, settings=(), with_signal=signal.SIGKILL):
    """The run's folder, after processes of it were struck, three steps after each other, and all was compared."""
    job = start_job(*SETTINGS, *settings, f"output_dir={folder}")
    for number, name in enumerate(victims, start=1):
        wait_for_steps(folder / "run", 3 * number, job)
        strike(job, name, with_signal)
    found, steps, drawn = finished(job, folder / "run")
    assert torch.equal(found, undisturbed[0])
    assert steps == undisturbed[1] == list(range(1, 13))
    assert drawn == undisturbed[2]
    return folder / "run"


def said(run_dir, kind, text):
    return [line["message"] for line in events(run_dir, kind) if text in line["message"]]


@pytest.mark.slow
def test_processes_are_killed_one_after_the_other_and_the_run_goes_on_by_itself(tmp_path, undisturbed):
    victims = ("ray::RolloutWorker", "ray::Coordinator", "ray::RayTrainWorker")
    run_dir = survivor(tmp_path, undisturbed, *victims)
    assert said(run_dir, "warning", "died")
    assert said(run_dir, "info", "with verified weights")
    assert said(run_dir, "warning", "the learner restarted and continues from the checkpoint of step")


@pytest.mark.slow
def test_a_mixture_with_replayed_routes_goes_on_likewise(tmp_path):
    mixture = ("model.experts=4", "model.intermediate_size=128", "rollout.router_replay=rollout")
    folder = tmp_path / "undisturbed"
    whole = finished(start_job(*SETTINGS, *mixture, f"output_dir={folder}"), folder / "run")
    run_dir = survivor(tmp_path, whole, "ray::RolloutWorker", "ray::RayTrainWorker", settings=mixture)
    assert said(run_dir, "warning", "the learner restarted and continues from the checkpoint of step")


@pytest.mark.slow
def test_a_killed_driver_is_gone_on_with_by_the_same_command_and_no_other(tmp_path, undisturbed):
    run_dir, settings = tmp_path / "run", [*SETTINGS, f"output_dir={tmp_path}"]
    job = start_job(*settings)
    wait_for_steps(run_dir, 5, job)
    job.kill()
    job.wait()
    assert not (run_dir / "summary.json").exists()
    with pytest.raises(ConfigError, match=r"unfinished run with other settings: learner\.lr"):
        run(load_config(None, [*settings, "learner.lr=1e-4"]))
    found, steps, drawn = finished(start_job(*settings), run_dir)
    assert said(run_dir, "info", "resuming after step")
    assert torch.equal(found, undisturbed[0])
    assert (steps, drawn) == undisturbed[1:]


@pytest.mark.slow
def test_a_worker_that_hangs_is_ended_and_started_anew(tmp_path, undisturbed):
    quick = ("rollout.silent_s=4", "rollout.heartbeat_s=0.5")
    run_dir = survivor(tmp_path, undisturbed, "ray::RolloutWorker", settings=quick, with_signal=signal.SIGSTOP)
    assert said(run_dir, "warning", "has not answered for")


@pytest.fixture
def nodes():
    """A cluster whose head has room for nothing, and two nodes with room for one process each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        yield cluster, [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.shutdown()


@pytest.mark.slow
def test_the_node_of_the_learner_is_lost_and_a_worker_beyond_those_asked_for_makes_room(tmp_path, nodes):
    cluster, places = nodes
    settings = [*SMALL, "steps=160", "checkpoint.every=2", "rollout.max_new_tokens=24"]
    settings += ["learner.threads=1", "rollout.threads=1"]
    expected = finished(start_job(*settings, f"output_dir={tmp_path / 'undisturbed'}"), tmp_path / "undisturbed/run")
    run_dir = tmp_path / "run"
    grown = (*settings, "rollout.max_workers=2", f"output_dir={tmp_path}")
    job = start_job(*grown, address=cluster.address)
    try:
        wait_for_steps(run_dir, 1, job)
        raylets = [place.all_processes["raylet"][0].process.pid for place in places]
        with_learner = [
            any(command.startswith("ray::RayTrainWorker") for _, command in descendants(pid)) for pid in raylets
        ]
        assert sum(with_learner) == 1
        cluster.add_node(num_cpus=1)  # which a second worker takes
        deadline = time.monotonic() + 120
        while not said(run_dir, "info", "joins the fleet"):
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        cluster.remove_node(places[with_learner.index(True)], allow_graceful=False)
        found = finished(job, run_dir)
    finally:
        job.kill()
    assert said(run_dir, "warning", "rollout worker 1 leaves, as the learner needs its room")
    assert said(run_dir, "warning", "the learner restarted and continues from the checkpoint of step")
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]
