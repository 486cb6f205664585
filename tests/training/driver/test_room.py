"""Memory of the GPUs of this machine, which a run is compared with before it starts; and the plan of its start."""

from types import SimpleNamespace

import pytest

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError
from qurl_ray.training.driver import room
from qurl_ray.training.driver.dry_run import dry_run
from qurl_ray.training.driver.early import check_early
from qurl_ray.training.driver.room import gpu_bytes
from qurl_ray.training.driver.run import run


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a program of this name on the path, which prints what the real one would."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)

    def put(*lines, status=0):
        folder = tmp_path / "bin"
        folder.mkdir()
        program = folder / "nvidia-smi"
        prints = "".join(f"echo '{line}'\n" for line in lines)
        program.write_text(f'#!/bin/sh\n[ "$1" = --query-gpu=memory.total ] || exit 9\n{prints}exit {status}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    return put


def test_the_smallest_gpu_counts(nvidia_smi):
    nvidia_smi("81559", "40960")
    assert gpu_bytes() == 40960 * 2**20


@pytest.mark.parametrize(("lines", "status"), [((), 0), ((), 9), (("[N/A]",), 0), (("no devices were found",), 6)])
def test_without_an_answer_nothing_is_known(nvidia_smi, lines, status):
    nvidia_smi(*lines, status=status)
    assert gpu_bytes() is None


def test_a_cluster_may_have_others(nvidia_smi, monkeypatch):
    nvidia_smi("81559")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert gpu_bytes() is None


@pytest.mark.slow
def test_a_run_too_large_for_its_gpu_is_refused_before_it_starts(nvidia_smi, tmp_path, monkeypatch):
    nvidia_smi("8192")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    config = load_config("quickstart_gpu", [f"output_dir={tmp_path / 'runs'}"])
    for start in (lambda: dry_run(check_early(config, dry=True), fresh=False), lambda: run(config)):
        with pytest.raises(ConfigError, match=r"too large for its GPUs: .* GB of a GPU.*: set .*kv_cache_gb=1"):
            start()
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_dry_run_shows_the_memory_of_each_turn(nvidia_smi, tmp_path):
    nvidia_smi("81559")
    checked = dry_run(check_early(load_config("quickstart_gpu", [f"output_dir={tmp_path}"]), dry=True), fresh=False)
    (memory,) = (line for line in checked.checked if line.startswith("memory of a GPU in GB, of 85, as planned:"))
    assert memory.endswith("learner and engine stay there together")
    assert "memory, placement" not in str(checked.unchecked)


def shards(folder, *sizes: int):
    for number, size in enumerate(sizes):
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(size)
    return folder


def test_the_plan_of_a_start_has_the_models_bytes_the_speed_of_the_disk_and_the_engines(tmp_path, monkeypatch):
    config = load_config("dapo_7b_math", ["rollout.workers=8", "rollout.vllm.tensor_parallel=1"])
    monkeypatch.setattr(room, "read_speed", lambda files: 0.5e9 if len(files) == 2 else pytest.fail("other files"))
    plan = room.start_plan(config, shards(tmp_path, 5_000_000_000, 10_000_000_000))
    assert "read the model's 15.0 GB once from the disk and then from memory, here 30 s at 500 MB/s;" in plan
    assert "8 engines start beside each other, and on each node the others wait until the first has compiled (" in plan
    assert plan.endswith(", at most 900 s")
    (tmp_path / "small").mkdir()
    one = room.start_plan(load_config("quickstart_gpu"), shards(tmp_path / "small", 400_000_000))
    assert one.startswith("the start, as planned: one engine starts (")
    assert room.start_plan(load_config("quickstart"), None) is None


def test_the_speed_of_reading_is_that_of_parts_of_all_files(tmp_path, monkeypatch):
    clock = iter((10.0, 12.0))
    monkeypatch.setattr(room, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(room, "_SAMPLE", 100)
    files = sorted(shards(tmp_path, 800, 40, 760).glob("*.safetensors"))
    # 16 parts of 100 bytes, a hundred apart; that at 800 has the 40 bytes of its file.
    assert room.read_speed(files) == (15 * 100 + 40) / 2
