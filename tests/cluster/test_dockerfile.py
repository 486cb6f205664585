"""cluster/Dockerfile without Docker: its sources are there, are not ignored, and its versions are the package's."""

import fnmatch
import re
import subprocess
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

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


@pytest.mark.parametrize("path", [".venv", "runs", ".git", "tests/cluster", "qurl_ray/training/__pycache__"])
def test_the_rest_is_ignored(path):
    assert ignored(path)


def test_what_the_package_is_built_from_is_copied_before_it_is_installed():
    install = next(i for i, (name, rest) in enumerate(INSTRUCTIONS) if name == "RUN" and "-e ." in rest)
    before = " ".join(rest for name, rest in INSTRUCTIONS[:install] if name == "COPY")
    for source in ("pyproject.toml", "README.md", "LICENSE", "qurl_ray/__init__.py"):
        assert source in before


def locked() -> dict[str, str]:
    lines = (ROOT / "cluster/requirements.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_locked_versions_are_those_that_the_package_asks_for():
    """Also of what its dependencies ask for, where the same version of them is installed here."""
    versions = locked()
    assert {"torch", "ray", "vllm", "deepspeed", "boto3"} <= versions.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    for name, version in versions.items():
        with suppress(PackageNotFoundError):
            if distribution(name).version == version:
                asked += distribution(name).requires or []
    environment = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
    checked = 0
    for requirement in map(Requirement, asked):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name in versions, requirement
            assert requirement.specifier.contains(versions[name], prereleases=True), requirement
            checked += 1
    assert checked > 200


def test_versions_are_the_package_s():
    assert locked()["torch"] in SpecifierSet(pins()["torch"])
    assert "-r requirements.lock" in TEXT
    assert "pip install --no-deps -e ." in TEXT
    cuda = re.match(r"nvidia/cuda:(\d+)\.(\d+)", arguments("FROM")[0])
    assert cuda.groups() == ("13", "0")  # of torch 2.13's wheels


@pytest.mark.parametrize("command", arguments("RUN"))
def test_commands_are_shell(command):
    checked = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_login_shells_find_the_environment():
    """`ray up` runs commands in login shells, whose PATH is not the image's."""
    assert "/opt/venv/bin:$PATH' > /etc/profile.d/" in TEXT
