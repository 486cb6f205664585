"""The memory group of a server, on folders that look like the kernel's."""

import os

import pytest

from qurl_ray.sandbox import cgroup

LIMIT = 2**30


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """A group that may be arranged, whose child this process is in."""
    parent = tmp_path / "root" / "user.slice" / "app.slice"
    (parent / "run-1.scope").mkdir(parents=True)
    (parent / "cgroup.procs").write_text("")
    (parent / "cgroup.subtree_control").write_text("cpu memory pids\n")
    own = tmp_path / "own"
    own.write_text("4:memory:/elsewhere\n0::/user.slice/app.slice/run-1.scope\n")
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path / "root")
    monkeypatch.setattr(cgroup, "_OWN", own)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return parent


def test_a_group_is_made_beside_the_own_one_and_joined(parent):
    group = cgroup.make_group(LIMIT)
    assert group.parent == parent
    written = {path.name: path.read_text() for path in group.iterdir()}
    assert written == {"memory.max": str(LIMIT), "memory.oom.group": "1", "memory.swap.max": "0"}
    cgroup.join_group(group)
    assert (group / "cgroup.procs").read_text() == "0"


@pytest.mark.parametrize(
    ("events", "full"), [("low 0\noom 3\noom_kill 2\n", True), ("oom_kill 0\n", False), ("", False)]
)
def test_a_kill_of_the_kernel_is_told_from_others(events, full, tmp_path):
    (tmp_path / "memory.events").write_text(events)
    assert cgroup.was_full(tmp_path) is full


def test_an_empty_group_is_removed(tmp_path):
    group = tmp_path / "group"
    group.mkdir()
    cgroup.remove_group(group)
    cgroup.remove_group(group)
    assert not group.exists()


def test_no_group_without_the_memory_controller(parent):
    (parent / "cgroup.subtree_control").write_text("cpu pids\n")
    assert cgroup.make_group(LIMIT) is None


def test_no_group_where_root_was_given_none(parent, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cgroup.make_group(LIMIT) is None
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"1", raising=False)
    assert cgroup.make_group(LIMIT) is not None


@pytest.mark.parametrize("own", ["0::/\n", "0::/user.slice/../..\n", "4:memory:/a/b\n"])
def test_no_group_above_the_visible_tree_or_in_version_1(own, parent, tmp_path):
    (tmp_path / "own").write_text(own)
    assert cgroup.make_group(LIMIT) is None
    assert len(list(parent.iterdir())) == 3
