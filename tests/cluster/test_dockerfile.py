"""cluster/Dockerfile without Docker: its sources are there, are not ignored, and its versions are the package's."""

import fnmatch
import re
import subprocess
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.cluster.pins import pins

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "cluster/Dockerfile").read_text()
INSTRUCTIONS = [
    line.split(None, 1)
    for line in re.sub(r"\\\n", " ", TEXT).splitlines()
    if line.strip() and not line.startswith("#")
]  # fmt: skip


def arguments(instruction: str) -> list[str]:
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


def ignored(path: str) -> bool:
    """As Docker decides: the last pattern that matches the path, or a folder above it, counts."""
    verdict = False
    for line in (ROOT / "cluster/Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.lstrip("!")
        above = [path, *map(str, Path(path).parents)][:-1]
        if line and not line.startswith("#") and any(fnmatch.fnmatch(one, pattern) for one in above):
            verdict = not line.startswith("!")
    return verdict


def sources() -> list[str]:
    words = [[word for word in copied.split() if not word.startswith("--")] for copied in arguments("COPY")]
    return [source for *from_here, _ in words for source in from_here]


def test_it_copies_what_a_job_needs():
    assert {"qurl_ray", "jobs", "pyproject.toml"} <= set(sources())


@pytest.mark.parametrize("source", sources())
def test_sources_are_there_and_not_ignored(source):
    assert (ROOT / source).exists()
    assert not ignored(source)


@pytest.mark.parametrize("path", [".venv", "runs", ".git", "tests/cluster", "qurl_ray/loop/__pycache__"])
def test_the_rest_is_ignored(path):
    assert ignored(path)


def test_what_the_package_is_built_from_is_copied_before_it_is_installed():
    install = next(i for i, (name, rest) in enumerate(INSTRUCTIONS) if name == "RUN" and "pip install -e" in rest)
    before = " ".join(rest for name, rest in INSTRUCTIONS[:install] if name == "COPY")
    for source in ("pyproject.toml", "README.md", "LICENSE", "qurl_ray/__init__.py"):
        assert source in before


def test_versions_are_the_package_s():
    (torch,) = re.findall(r"torch==([\d.]+)", TEXT)
    assert torch in SpecifierSet(pins()["torch"])
    assert ".[gpu]" in TEXT
    assert "vllm==" not in TEXT  # pyproject.toml says which
    cuda = re.match(r"nvidia/cuda:(\d+)\.(\d+)", arguments("FROM")[0])
    assert cuda.groups() == ("13", "0")  # of torch 2.13's wheels


@pytest.mark.parametrize("command", arguments("RUN"))
def test_commands_are_shell(command):
    checked = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_login_shells_find_the_environment():
    """`ray up` runs commands in login shells, whose PATH is not the image's."""
    assert "/opt/venv/bin:$PATH' > /etc/profile.d/" in TEXT
