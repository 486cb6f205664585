"""Memory of the GPUs of this machine, which a run is compared with before it starts."""

import pytest

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError
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
