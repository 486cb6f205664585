"""The public API, frozen: whoever changes a line here breaks somebody's code, and says so in CHANGELOG.md."""

import inspect
import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import qurl_ray
from qurl_ray import errors

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text()

SIGNATURES = {
    "Callback": "()",
    "Problem": (
        "(*, uid: str, prompt: str, answer: str, meta: dict = <factory>, messages: list[dict] | None = None, "
        "held_out_set: str = '', chat_template_args: dict = <factory>) -> None"
    ),
    "Report": (
        "(*, policy: str, quantization: str, kernels: list[str], reward: Estimate, accuracy: Estimate, samples: int, "
        "temperature: float, avg_reward_at_k: Estimate | None, avg_at_k: Estimate | None, pass_at_k: Estimate | None, "
        "failed_rewards: int, seconds: float, sets: dict[str, tuple[Estimate, Estimate]] = <factory>, "
        "against: Against | None = None) -> None"
    ),
    "Step": (
        "(*, messages: Sequence[dict[str, Any]] = (), reward: float | None = None, done: bool = False, "
        "info: dict[str, Any] = <factory>) -> None"
    ),
    "Traits": (
        "(*, deterministic: bool = False, tools: Sequence[dict[str, Any]] = (), described: bool = True, "
        "tool_format: Optional[Literal['hermes', 'llama']] = None) -> None"
    ),
    "RunResult": "(*, run_dir: Path, policy: Path | None, summary: dict[str, Any], interrupted: bool) -> None",
    "evaluate": (
        "(config: RunConfig, policy: Path | str, *, quantization: str | None = None, samples: int = 0, "
        "temperature: float = 1.0, against: Path | str | None = None, "
        "progress: Callable[[int, int], None] = <function <lambda>>) -> Report"
    ),
    "load_config": "(path: Path | str | None, overrides: Sequence[str] = ()) -> RunConfig",
    "run": (
        "(config: RunConfig, *, fresh: bool = False, extend: bool = False, callbacks: Iterable[Callback] = ()) "
        "-> RunResult"
    ),
    "train": (
        "(model: str | Path | Mapping[str, Any], data: str | Path | Iterable[Mapping[str, Any] | str], "
        "reward: Callable[..., float] | str | None = None, *, held_out: str | Path | Iterable[Mapping[str, Any] | str] "
        "| Mapping[str, str | Path | Iterable[Mapping[str, Any] | str]] | None = None, "
        "callbacks: Iterable[Callback] = (), fresh: bool = False, extend: bool = False, **settings: Any) -> RunResult"
    ),
}

SECTIONS = (
    "name seed steps output_dir model task precision_flow placement rollout environment quantization algorithm "
    "learner guard sync tracking evaluation checkpoint export"
)

ERRORS = {
    "QurlError": "Exception",
    "CheckpointError": "QurlError",
    "ConfigError": "QurlError",
    "CoordinatorDied": "QurlError",
    "DataError": "QurlError",
    "DeadlineExceeded": "QurlError",
    "EngineError": "QurlError",
    "EnvironmentFailed": "QurlError",
    "ExtensionError": "ConfigError",
    "PlacementError": "QurlError",
    "QuantizationError": "QurlError",
    "RewardError": "QurlError",
    "StaleWeights": "EngineError",
    "SyncError": "QurlError",
}
"""With the first of their bases."""


def signature(name: str) -> str:
    """Types by their own names: where they are defined is not public."""
    shown = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(getattr(qurl_ray, name))))
    return re.sub(r"[a-z_][\w.]*\.(?=[A-Z])", "", shown)


def test_the_names_are_these():
    assert sorted(qurl_ray.__all__) == sorted([*SIGNATURES, *ERRORS, "RunConfig", "__version__"])
    assert set(qurl_ray.__all__) <= set(dir(qurl_ray))
    assert re.fullmatch(r"\d+\.\d+\.\d+", qurl_ray.__version__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_name_takes_and_returns_what_it_did(name):
    assert signature(name) == SIGNATURES[name]


def test_a_runs_settings_have_the_sections_that_they_had():
    assert list(qurl_ray.RunConfig.model_fields) == SECTIONS.split()


def test_all_errors_are_public_and_in_their_places():
    found = {name: kind.__bases__[0].__name__ for name, kind in vars(errors).items() if inspect.isclass(kind)}
    assert found == ERRORS
    assert all(getattr(qurl_ray, name) is getattr(errors, name) for name in ERRORS)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'qurl_ray' has no attribute 'no_such_name'"):
        _ = qurl_ray.no_such_name


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, qurl_ray; qurl_ray.QurlError; print({'torch', 'ray', 'pydantic', 'numpy'} & set(sys.modules));"
        "qurl_ray.RunConfig, qurl_ray.load_config, qurl_ray.Problem; print({'torch', 'ray'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split("\n")[:2] == ["set()", "set()"]


def test_the_page_has_every_name():
    assert {name for name in qurl_ray.__all__ if not re.search(rf"\b{name}\b", PAGE)} == set()
    tree = inspect.getdoc(errors)
    assert tree
    first = [re.split(r"\s{2,}\(", line)[0].rstrip() for line in tree.split("\n\n")[1].splitlines()]
    assert "\n".join(first) in PAGE


def test_the_package_ships_its_types_and_is_cited_by_its_version():
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["qurl_ray"]
    assert "py.typed" in shipped
    assert (ROOT / "qurl_ray" / "py.typed").exists()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["version"]) == ("qurl-ray", qurl_ray.__version__)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("given", "found"), [({}, "4000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_openmp_s_threads_sleep_soon_unless_told_otherwise(given, found):
    """What libgomp itself says that it has read, when torch was imported."""
    clean = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", "import qurl_ray, torch"],
        env=clean | given | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    counts = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert counts
    assert set(counts) == {found} if found else "1000" not in counts


PAGES = """
import qurl_ray
from resource import RUSAGE_SELF, getrusage
from threading import Thread

def work():
    for _ in range(9):
        found.append(getrusage(RUSAGE_SELF).ru_minflt)
        bytearray(96 * 2**20)

found = []
thread = Thread(target=work)
thread.start()
thread.join()
print(found[-1] - found[3])
"""
"""Program that prints how many pages it fetched for five blocks of 24,576 pages each, in a thread, as learners do."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
@pytest.mark.parametrize("start", ["told by a call", "told by its parent", "told otherwise"])
def test_memory_that_returns_is_kept_unless_told_otherwise(start):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    code = PAGES
    if start == "told by its parent":
        code = f"import qurl_ray, subprocess, sys; subprocess.run([sys.executable, '-c', {PAGES!r}], check=True)"
    given = {"MALLOC_TRIM_THRESHOLD_": "131072"} if start == "told otherwise" else {}
    done = subprocess.run([sys.executable, "-c", code], env=clean | given, capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 100_000) == (start == "told otherwise"), done.stdout


FRESH = """
from resource import RUSAGE_SELF, getrusage
before = getrusage(RUSAGE_SELF).ru_minflt
bytearray(256 * 2**20)
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""
"""Program that prints how many pages it fetched for 256 MiB: 65,536 of 4 KiB."""
LARGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="another malloc")
@pytest.mark.skipif(not LARGE.exists() or "[never]" in LARGE.read_text(), reason="the kernel has no large pages")
@pytest.mark.parametrize("tunables", [None, "glibc.malloc.check=0"])
def test_processes_that_a_run_starts_fetch_large_pages_unless_told_otherwise(tunables):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    given = {"GLIBC_TUNABLES": tunables} if tunables else {}
    code = f"import qurl_ray, subprocess, sys; subprocess.run([sys.executable, '-c', {FRESH!r}], check=True)"
    done = subprocess.run([sys.executable, "-c", code], env=clean | given, capture_output=True, text=True, check=True)
    pages = int(done.stdout)
    if tunables is None:
        assert pages < 50_000  # fewer where memory is in one piece
    elif "[always]" not in LARGE.read_text():
        assert pages > 60_000
