"""Checkpoints on disk: whole or passed over, kept or dropped."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from qurl_ray.errors import CheckpointError
from qurl_ray.runs.checkpoint import complete, latest, partial_folder, prune, verify


def write(run_dir, step: int, reward: float | None = None, state: str = "{}"):
    partial = partial_folder(run_dir, step)
    (partial / "learner").mkdir(parents=True)
    (partial / "learner" / "parameters").write_bytes(bytes([step]) * 1000)
    (partial / "loop.json").write_text(state)
    return complete(partial, step=step, reward=reward)


def steps(run_dir) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def test_the_latest_whole_one_is_found_and_newer_damaged_ones_are_named(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step, reward=step / 10)
    three, four = (tmp_path / "checkpoints" / f"step-{step:06d}" for step in (3, 4))
    data = bytearray((four / "learner" / "parameters").read_bytes())
    data[500] ^= 1
    (four / "learner" / "parameters").write_bytes(data)
    (three / "loop.json").unlink()
    found, rejected = latest(tmp_path)
    assert (found.step, found.reward, found.learner.parent) == (2, 0.2, tmp_path / "checkpoints" / "step-000002")
    assert [line.split(": ", 1)[1] for line in rejected] == [
        f"{four}: learner/parameters is damaged: its SHA-256 is not the manifest's",
        f"{three}: loop.json is missing",
    ]


def test_a_damaged_one_is_set_aside_and_costs_no_whole_one_its_place(tmp_path):
    write(tmp_path, 4)
    write(tmp_path, 6)
    (tmp_path / "checkpoints" / "step-000006" / "loop.json").write_text("torn")
    assert latest(tmp_path)[0].step == 4
    write(tmp_path, 5)
    prune(tmp_path, 1)
    assert steps(tmp_path) == [5]
    assert (tmp_path / "checkpoints" / "damaged.step-000006").is_dir()
    assert latest(tmp_path)[0].step == 5


def test_a_file_that_was_slipped_in_is_not_loaded(tmp_path):
    folder = write(tmp_path, 1).folder
    (folder / "learner" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="is not in the manifest"):
        verify(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"step": 1}', '{"step": "x", "reward": null, "sha256": {}}'])
def test_an_unreadable_manifest_is_an_error_by_name(tmp_path, text):
    folder = write(tmp_path, 1).folder
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"no readable manifest\.json"):
        verify(folder)
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* is whole"):
        latest(tmp_path)


def test_a_manifest_without_its_own_checksum_is_of_an_earlier_version(tmp_path):
    folder = write(tmp_path, 2, reward=0.5).folder
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["manifest_sha256"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="of an earlier version"):
        verify(folder)


@pytest.mark.parametrize("change", [{"reward": 0.6}, {"step": 3}, {"reward": None}, {"more": 1}])
def test_a_change_of_the_manifest_itself_is_found(tmp_path, change):
    folder = write(tmp_path, 2, reward=0.5).folder
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(CheckpointError, match="its own SHA-256 differs"):
        verify(folder)


def test_a_manifest_of_another_step_is_an_error(tmp_path):
    folder = write(tmp_path, 1).folder
    with pytest.raises(CheckpointError, match="it is of step 1"):
        verify(folder.rename(folder.with_name("step-000003")))


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert latest(tmp_path) == (None, [])


def test_a_half_written_one_is_not_seen_and_goes(tmp_path):
    write(tmp_path, 1)
    partial = partial_folder(tmp_path, 2)
    partial.mkdir()
    (partial / "manifest.json").write_text(json.dumps({"step": 2, "reward": None, "sha256": {}}))
    assert latest(tmp_path)[0].step == 1
    prune(tmp_path, 1)
    assert not partial.exists()


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    for step, reward in ((1, 0.5), (2, 0.9), (3, None), (4, 0.7), (5, None), (6, 0.8)):
        write(tmp_path, step, reward)
        prune(tmp_path, 2)
    assert steps(tmp_path) == [2, 5, 6]


def test_one_that_is_there_already_is_replaced(tmp_path):
    write(tmp_path, 1, reward=0.1)
    assert write(tmp_path, 1, reward=0.2).reward == 0.2
    assert latest(tmp_path)[0].reward == 0.2
    shutil.rmtree(tmp_path / "checkpoints")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("what", ["manifest.json", "parameters"])
def test_one_that_cannot_be_read_is_an_error_and_stays(tmp_path, monkeypatch, number, what):
    """The disk may be back in a minute: neither is it damaged, nor does the run start from zero."""
    write(tmp_path, 1)
    write(tmp_path, 2)
    opened = Path.open

    def failing(path, *args, **kwargs):
        if path.name == what and "step-000002" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(CheckpointError, match=f"step-000002.*{what} cannot be read"):
        latest(tmp_path)
    assert steps(tmp_path) == [1, 2]
    monkeypatch.undo()
    assert latest(tmp_path)[0].step == 2


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("what", ["checkpoints", "step-000002/learner"])
def test_a_folder_that_cannot_be_listed_is_an_error_and_all_stays(tmp_path, monkeypatch, number, what):
    write(tmp_path, 1)
    write(tmp_path, 2)

    def failing(listed):
        def call(path="."):
            if str(path).endswith(what):
                raise OSError(number, os.strerror(number), str(path))
            return listed(path)

        return call

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    with pytest.raises(CheckpointError, match=f"{what} cannot be read"):
        latest(tmp_path)
    monkeypatch.undo()
    assert steps(tmp_path) == [1, 2]
    assert latest(tmp_path)[0].step == 2


def hold_open(monkeypatch, name: str) -> None:
    """Let files of that name not be removed, as on NFS where they are open elsewhere: their folders stay."""
    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", lambda path, **how: None if str(path).endswith(name) else unlink(path, **how))


def test_an_old_one_that_cannot_be_removed_is_out_of_the_way_and_costs_nothing(tmp_path, monkeypatch):
    write(tmp_path, 1)
    write(tmp_path, 2)
    hold_open(monkeypatch, "parameters")
    prune(tmp_path, 1)
    assert steps(tmp_path) == [2]
    assert write(tmp_path, 2, reward=0.5).reward == 0.5  # takes the place of one that cannot be removed either
    assert latest(tmp_path)[0].reward == 0.5
    monkeypatch.undo()
    prune(tmp_path, 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_a_folder_that_cannot_be_renamed_or_listed_does_not_stop_a_clean_up(tmp_path, monkeypatch):
    write(tmp_path, 1)
    write(tmp_path, 2)

    def failing(path, *_):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr(Path, "rename", failing)
    prune(tmp_path, 1)
    monkeypatch.setattr(os, "listdir", failing)
    monkeypatch.setattr(os, "scandir", failing)
    prune(tmp_path, 1)
    monkeypatch.undo()
    assert steps(tmp_path) == [1, 2]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_zero(tmp_path):
    for step in (1, 2):
        (write(tmp_path, step).folder / "loop.json").unlink()
    for _ in range(2):  # also the second time
        with pytest.raises(CheckpointError, match=r"no checkpoint of .* is whole: .*loop.json is missing.*--fresh"):
            latest(tmp_path)
    assert steps(tmp_path) == [1, 2]


def test_files_of_the_file_system_are_no_damage(tmp_path):
    folder = write(tmp_path, 1).folder
    (folder / ".DS_Store").write_bytes(b"Finder")
    (folder / "learner" / ".nfs000000000012").write_bytes(b"open elsewhere")
    assert latest(tmp_path)[0].step == 1
