"""Imports point one way, and heavy packages stay where they belong (docs/design.md draws the layers)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "qurl_ray"
LAYERS = [
    {"types", "errors", "environment", "signals", "spans", "extensions", "tables", "config", "cache", "files"}
    | {"rendezvous"},
    {"numerics", "transfer", "sandbox", "runs"},
    {"rl", "quant", "rewards", "report", "tools"},
    {"policy", "data", "tracking", "environments"},
    {"engines", "learner"},
    {"weights"},
    {"actors"},
    {"training", "evaluation", "serving", "planning"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HEAVY = {
    "ray": {"weights", "actors", "training", "evaluation", "serving"},
    "mlflow": {"tracking", "serving"},
    "deepspeed": {"learner"},
    "transformers": {"policy", "engines", "learner", "training", "evaluation", "serving"},
    "datasets": {"data"},
    "reasoning_gym": {"data", "rewards"},
    "math_verify": {"rewards"},
    "textarena": {"environments"},
    "skyrl_gym": {"environments"},
    "verifiers": {"environments"},
    "websockets": {"environments"},
    "torch": set(LEVEL) - LAYERS[0] - {"sandbox", "rewards", "report", "tracking", "environments", "tools", "runs"},
}
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.name != "__init__.py")


def imported(path: Path) -> set[str]:
    """Dotted names that the file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    here = path.relative_to(ROOT).with_suffix("").parts[0]
    for name in imported(path):
        top, *rest = name.split(".")
        if top == "qurl_ray" and rest and rest[0] != here:
            same_layer_by_design = (here, rest[0]) in SIBLINGS
            assert LEVEL[rest[0]] < LEVEL[here] or same_layer_by_design, f"{here} may not import {name}"
        if top in HEAVY:
            assert here in HEAVY[top], f"{name} may be imported only by {sorted(HEAVY[top])}"


SIBLINGS = {
    ("training", "evaluation"),
    ("training", "planning"),
    ("spans", "types"),
    ("extensions", "errors"),
    ("tables", "errors"),
    ("tables", "extensions"),
    ("config", "errors"),
    ("config", "tables"),
    ("config", "extensions"),
    ("config", "files"),
}
"""Pairs (importer, imported) inside a layer; nothing goes the other way."""


PROCESSES = {"driver", "rank", "coordinator"}
"""Folders of training/, each of what runs in one kind of process."""
STARTS = {
    ("driver/run.py", "qurl_ray.training.rank.entry"),
    ("driver/run.py", "qurl_ray.training.coordinator.coordinator"),
}
"""The driver hands Ray what the other processes run."""
LOOP = sorted(path for path in (ROOT / "training").rglob("*.py") if path.parent != ROOT / "training")


@pytest.mark.parametrize("path", LOOP, ids=lambda path: str(path.relative_to(ROOT)))
def test_processes_of_a_run_share_only_records(path):
    """rank/, driver/ and coordinator/ meet in messages.py, and import nothing of each other."""
    file = path.relative_to(ROOT / "training")
    others = PROCESSES - {file.parts[0]}
    for name in imported(path):
        of_loop = name.removeprefix("qurl_ray.training.").split(".")[0] if name.startswith("qurl_ray.training.") else ""
        assert of_loop not in others or (str(file), name) in STARTS, f"{file} may not import {name}"


# --- circles -------------------------------------------------------------------------------------------------------


def module_of(path: Path, root: Path) -> str:
    """Return the dotted name of the module, or of the package if the file is its __init__."""
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return the modules of the package `root`, each with those that it names in imports.

    Imports inside functions and under TYPE_CHECKING count. That Python runs the __init__ of a module's packages before
    the module does not, as every package with an import in its __init__ would be a circle.
    """
    files = {module_of(path, root): path for path in root.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        named = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: write an absolute import"
                found = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= (found & set(files)) | ({node.module} if found - set(files) else set())
        graph[module] = (named & set(files)) - {module}
    return graph


def way(graph: dict[str, set[str]], start: str, end: str) -> list[str]:
    """Return the shortest chain of imports from `start` to `end`, at least one long; [] if there is none."""
    chains = [[start]]
    seen: set[str] = set()
    for chain in chains:  # which grows: breadth first
        for module in sorted(graph[chain[-1]] - seen):
            seen.add(module)
            chains.append([*chain, module])
            if module == end:
                return chains[-1]
    return []


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return one circle, as a chain of imports, of each strongly connected component of more than one module."""
    found: list[list[str]] = []
    placed: set[str] = set()
    for module in sorted(graph):
        if module not in placed and (circle := way(graph, module, module)):
            placed |= {other for other in graph if way(graph, module, other) and way(graph, other, module)}
            found.append(circle)
    return found


def test_no_modules_import_each_other_in_a_circle():
    found = [" -> ".join(circle) for circle in circles(import_graph(ROOT))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "from pack.low.c import name",
        "from pack.low import c",
        "import pack.low.c",
        "def late():\n    from pack.low.c import name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.low.c import name",
    ],
)
def test_the_search_finds_every_kind_of_circle(tmp_path, line):
    files = {
        "__init__.py": "",
        "a.py": "from pack.low.b import name",
        "low/__init__.py": "",
        "low/b.py": line,
        "low/c.py": "from pack import d",
        "d.py": "import pack.low.b",
    }
    for name, text in files.items():
        (tmp_path / "pack" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pack" / name).write_text(text)
    graph = import_graph(tmp_path / "pack")
    assert circles(graph) == [["pack.d", "pack.low.b", "pack.low.c", "pack.d"]]
    assert circles(graph | {"pack.d": set()}) == []


# --- heavy packages ------------------------------------------------------------------------------------------------


def test_reading_a_configuration_needs_neither_torch_nor_ray():
    code = "import sys, qurl_ray.config, qurl_ray.rewards.process; print({'torch', 'ray'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
