"""Copies of runs in object storage: S3's protocol on loopback, faults, and runs that go on from there."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
import torch

from qurl_ray.config import load_config
from qurl_ray.errors import CheckpointError, ConfigError
from qurl_ray.runs.checkpoint import complete, latest, partial_folder
from qurl_ray.training.driver import upload
from qurl_ray.training.driver.run import run
from qurl_ray.training.driver.upload import Storage, Uploader
from qurl_ray.types import Event
from tests.training.runs import WHOLE, kill_all, parameters, start_job, wait_for_steps


@pytest.fixture
def place(tmp_path):
    """Address of a folder that stands in for a bucket; the run's folder."""
    return f"file://{tmp_path}/bucket", tmp_path / "runs" / "mine"


def settings(place, *more):
    address, run_dir = place
    return load_config(None, [f"output_dir={run_dir.parent}", "name=mine", f"checkpoint.upload={address}", *more])


def checkpoint(run_dir, step, content="x"):
    partial = partial_folder(run_dir, step)
    (partial / "learner").mkdir(parents=True)
    (partial / "learner" / "state").write_text(content * 1000)
    (partial / "loop.json").write_text("{}")
    (run_dir / "config.yaml").write_text("name: mine\n")
    (run_dir / "metrics.jsonl").write_text(f'{{"kind": "step", "step": {step}}}\n')
    return complete(partial, step=step, reward=None).folder


def uploaded(place, *steps):
    storage = Storage(settings(place))
    run_dir = place[1]
    run_dir.mkdir(parents=True, exist_ok=True)
    own = storage.claim(run_dir)
    for step in steps:
        storage.copy_checkpoint(checkpoint(run_dir, step))
    return storage, own


def rested(monkeypatch):
    """Let the owner's last sign be long ago."""
    monkeypatch.setattr(upload, "_ACTIVE_S", -1.0)


def test_a_run_whose_folder_is_gone_comes_back_from_its_newest_whole_copy(place, monkeypatch):
    storage, own = uploaded(place, 3, 6)
    run_dir = place[1]
    shutil.rmtree(run_dir)
    rested(monkeypatch)
    (note,) = Storage(settings(place)).restore(run_dir)
    assert "its checkpoint of step 6 came from" in note
    assert latest(run_dir)[0].step == 6
    assert (run_dir / "metrics.jsonl").read_text() == '{"kind": "step", "step": 6}\n'
    assert storage.claim(run_dir) == own  # it is the same run
    assert Storage(settings(place)).restore(run_dir) == []  # what is here counts


@pytest.mark.parametrize("damage", ["manifest", "file", "content"])
def test_a_half_copied_checkpoint_is_never_resumed(place, tmp_path, monkeypatch, damage):
    uploaded(place, 3, 6)
    copy = tmp_path / "bucket" / "mine" / "checkpoints" / "step-000006"
    if damage == "manifest":
        (copy / "manifest.json").unlink()
    elif damage == "file":
        (copy / "learner" / "state").unlink()
    else:
        (copy / "learner" / "state").write_text("y")
    shutil.rmtree(place[1])
    rested(monkeypatch)
    notes = Storage(settings(place)).restore(place[1])
    assert latest(place[1])[0].step == 3
    assert len(notes) == (1 if damage == "manifest" else 2)


def test_where_no_copy_is_whole_the_run_does_not_begin_anew(place, tmp_path, monkeypatch):
    uploaded(place, 3)
    (tmp_path / "bucket" / "mine" / "checkpoints" / "step-000003" / "loop.json").write_text("z")
    shutil.rmtree(place[1])
    rested(monkeypatch)
    with pytest.raises(CheckpointError, match=r"no checkpoint in file://.* is whole: .*loop\.json is damaged"):
        Storage(settings(place)).restore(place[1])
    assert not place[1].exists()


def test_the_manifest_comes_last(place, monkeypatch):
    storage, _ = uploaded(place)
    order, put = [], Storage._put
    monkeypatch.setattr(Storage, "_put", lambda self, here, name: (order.append(name), put(self, here, name)))
    storage.copy_checkpoint(checkpoint(place[1], 3))
    assert order[-1] == "checkpoints/step-000003/manifest.json"
    assert len(order) == 5


def test_a_long_copy_gives_signs_of_life(place, monkeypatch):
    storage, _ = uploaded(place)
    folder, beats, beat = checkpoint(place[1], 3), [], Storage.beat
    monkeypatch.setattr(Storage, "beat", lambda self: (beats.append(1), beat(self)))
    storage.copy_checkpoint(folder)
    assert beats == []  # it was quick
    monkeypatch.setattr(upload, "_BEAT_S", -1.0)
    storage.copy_checkpoint(folder)
    assert len(beats) == 5  # one before each file


def test_two_runs_of_one_name_at_one_address_are_refused(place, tmp_path, monkeypatch):
    uploaded(place, 3)
    elsewhere = tmp_path / "other machine" / "mine"
    elsewhere.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"is used by a run on .*, which was active \d+ s ago: set another name"):
        Storage(settings(place)).claim(elsewhere)
    shutil.rmtree(elsewhere)
    with pytest.raises(ConfigError, match="was active"):  # nor does it resume from the other's checkpoint
        Storage(settings(place)).restore(elsewhere)
    rested(monkeypatch)
    elsewhere.mkdir()
    with pytest.raises(ConfigError, match="holds another run of this name"):
        Storage(settings(place)).claim(elsewhere)


def test_a_restore_that_breaks_off_is_begun_again(place, monkeypatch):
    uploaded(place, 3)
    shutil.rmtree(place[1])
    rested(monkeypatch)
    get, calls = Storage._get, []

    def broken(self, remote, here):
        calls.append(remote)
        if len(calls) == 2:
            raise ConnectionError("gone")
        get(self, remote, here)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "_get", broken)
        with pytest.raises(ConfigError, match="cannot be read: ConnectionError: gone"):
            Storage(settings(place)).restore(place[1])
    assert not place[1].exists()
    assert list(place[1].parent.iterdir()) == []
    Storage(settings(place)).restore(place[1])
    assert latest(place[1])[0].step == 3
    assert (place[1] / "config.yaml").stat().st_mode & 0o077 == 0


def test_a_place_that_holds_no_checkpoint_is_taken_over(place, monkeypatch):
    uploaded(place)
    shutil.rmtree(place[1])
    with pytest.raises(ConfigError, match="was active"):
        uploaded(place)
    rested(monkeypatch)
    storage, own = uploaded(place, 3)
    assert (place[1] / "upload_id").read_text().strip() == own
    storage.beat()


def test_a_process_that_was_replaced_copies_nothing_more(place, monkeypatch):
    storage, _ = uploaded(place, 3)
    sink = Uploader(storage, place[1])
    Storage(settings(place)).claim(place[1])  # another process of the same run
    sink.handle(event(checkpoint(place[1], 6), 6), 0.0)
    sink._thread.join(20)
    assert not sink._thread.is_alive()
    (note,) = sink.notices()
    assert "nothing more is copied from here" in note
    sink.close("finished")


def test_a_run_that_has_ended_may_go_on_elsewhere_at_once(place, tmp_path):
    storage, own = uploaded(place, 3)
    sink = Uploader(storage, place[1])
    sink.handle(Event(kind="info", step=0), 0.0)
    sink.close("interrupted")
    elsewhere = tmp_path / "other machine" / "mine"
    other = Storage(settings(place))
    assert "its checkpoint of step 3 came from" in other.restore(elsewhere)[-1]
    assert other.claim(elsewhere) == own


def test_a_start_that_fails_leaves_no_thread(place):
    storage, _ = uploaded(place)
    sink = Uploader(storage, place[1])
    assert not sink._thread.is_alive()
    sink.close("failed")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nonsense://bucket", "cannot be opened: ValueError: Protocol not known"),
        ("file:///proc/none", "cannot be written"),
    ],
)
def test_an_address_that_cannot_be_used_is_told_before_the_run(tmp_path, address, message):
    run_dir = tmp_path / "mine"
    run_dir.mkdir()
    config = load_config(None, [f"output_dir={tmp_path}", "name=mine", f"checkpoint.upload={address}"])
    with pytest.raises(ConfigError, match=message):
        Storage(config).claim(run_dir)


# --- the thread ------------------------------------------------------------------------------------------------------


class Slow(Storage):
    """Copies only while the gate is open, and fails as often as it was told."""

    def __init__(self, config):
        super().__init__(config)
        self.gate, self.failures, self.copied = threading.Event(), 0, []

    def copy_checkpoint(self, folder):
        self.gate.wait(30)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("bucket is away")
        super().copy_checkpoint(folder)
        self.copied.append(folder.name)


def event(folder, step):
    return Event(kind="checkpoint", step=step, values={"folder": str(folder)})


@pytest.fixture
def slow(place, monkeypatch):
    monkeypatch.setattr(upload, "_RETRY_S", (0.01, 0.05))
    storage = Slow(settings(place))
    place[1].mkdir(parents=True)
    storage.claim(place[1])
    return storage, Uploader(storage, place[1])


def test_copies_that_fall_behind_block_nothing_and_skip_to_the_newest(slow, place):
    storage, sink = slow
    for step in range(1, 6):  # the first copy waits for the gate
        sink.handle(event(checkpoint(place[1], step), step), 0.0)
    storage.gate.set()
    sink.close("interrupted")
    assert storage.copied[-1] == "step-000005"
    assert len(storage.copied) <= 2
    assert sink.notices() == []


def test_a_copy_that_fails_is_told_once_and_tried_again(slow, place):
    storage, sink = slow
    storage.failures = 3
    storage.gate.set()
    sink.handle(event(checkpoint(place[1], 1), 1), 0.0)
    sink.close("finished")
    assert storage.copied == ["step-000001"]
    (note,) = sink.notices()
    assert "failed (ConnectionError: bucket is away); it is tried again" in note


def test_storage_that_stays_away_does_not_keep_a_run_from_ending(slow, place):
    storage, sink = slow
    storage.failures = 10**6
    storage.gate.set()
    sink.handle(event(checkpoint(place[1], 1), 1), 0.0)
    sink.close("finished")
    first, last = sink.notices()
    assert "it is tried again" in first
    assert "lacks the last copies" in last
    assert not sink._thread.is_alive()


def test_a_checkpoint_that_was_deleted_here_meanwhile_is_forgotten(slow, place):
    storage, sink = slow
    first = checkpoint(place[1], 1)
    sink.handle(event(first, 1), 0.0)
    time.sleep(0.1)
    shutil.rmtree(first)
    storage.gate.set()
    sink.handle(event(checkpoint(place[1], 2), 2), 0.0)
    sink.close("finished")
    assert storage.copied == ["step-000002"]
    assert sink.notices() == []


def test_at_the_end_the_policy_is_there_and_copies_that_are_gone_here_are_gone(slow, place, tmp_path):
    storage, sink = slow
    storage.gate.set()
    run_dir = place[1]
    first = checkpoint(run_dir, 1)
    sink.handle(event(first, 1), 0.0)
    deadline = time.monotonic() + 120
    while not storage.copied and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(first)
    (run_dir / "policy").mkdir()
    (run_dir / "policy" / "config.json").write_text("{}")
    (run_dir / "summary.json").write_text("{}")
    sink.handle(event(checkpoint(run_dir, 2), 2), 0.0)
    sink.close("finished")
    there = tmp_path / "bucket" / "mine"
    assert [path.name for path in (there / "checkpoints").iterdir()] == ["step-000002"]
    assert (there / "policy" / "config.json").read_text() == "{}"
    assert (there / "summary.json").exists()


# --- S3 --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3():
    """A server of S3's protocol on loopback, with a bucket; its environment."""
    server_module = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem().mkdir("models")
        yield environment
    server.stop()


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_run_whose_folder_is_gone_goes_on_from_the_bucket_to_the_same_parameters(
    tmp_path, cluster, s3, monkeypatch
):
    """SIGKILL amid the run, and its machine's folder deleted; its heartbeat is waited out by making it older."""
    import s3fs

    given = [*WHOLE, "checkpoint.upload=s3://models/runs", "name=mine"]
    undisturbed = run(load_config(None, [*WHOLE, "name=whole", f"output_dir={tmp_path}"]))
    bucket = s3fs.S3FileSystem()
    job = start_job(*given, "rollout.timeout_s=60", f"output_dir={tmp_path}", **s3)
    run_dir = tmp_path / "mine"
    wait_for_steps(run_dir, 2, job)
    deadline = time.monotonic() + 60
    while not bucket.glob("models/runs/mine/checkpoints/*/manifest.json"):
        bucket.invalidate_cache()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(job.pid, signal.SIGKILL)
    kill_all(job)
    job.communicate()
    shutil.rmtree(run_dir)
    owner = json.loads(bucket.cat("models/runs/mine/owner.json"))
    bucket.pipe("models/runs/mine/owner.json", json.dumps(owner | {"seen": 0.0}).encode())
    resumed = run(load_config(None, [*given, "rollout.timeout_s=60", f"output_dir={tmp_path}"]))
    assert resumed.summary["steps"] == 4
    assert torch.equal(parameters(resumed.policy), parameters(undisturbed.policy))
    bucket.invalidate_cache()
    assert bucket.exists("models/runs/mine/policy/model.safetensors")
    assert bucket.exists("models/runs/mine/summary.json")
