"""Imports point one way, and heavy packages stay where they belong (docs/design.md draws the layers)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "qurl_ray"
LAYERS = [
    {"types", "errors", "spans", "extensions", "tables", "config", "cache"},
    {"numerics"},
    {"rl", "quant", "rewards", "report"},
    {"policy", "data", "tracking"},
    {"rollout", "learner", "sync"},
    {"actors"},
    {"loop", "evaluation", "serving", "planning"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HEAVY = {
    "ray": {"actors", "loop", "evaluation", "serving"},
    "mlflow": {"tracking", "serving"},
    "deepspeed": {"learner"},
    "transformers": {"policy", "rollout", "learner", "loop", "evaluation", "serving"},
    "datasets": {"data"},
    "reasoning_gym": {"data", "rewards"},
    "math_verify": {"rewards"},
    "torch": set(LEVEL) - LAYERS[0] - {"rewards", "report", "tracking"},
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
    ("loop", "evaluation"),
    ("loop", "planning"),
    ("spans", "types"),
    ("extensions", "errors"),
    ("tables", "errors"),
    ("tables", "extensions"),
    ("config", "errors"),
    ("config", "tables"),
    ("config", "extensions"),
}
"""Pairs (importer, imported) inside a layer; nothing goes the other way."""


PROCESSES = {"driver", "rank", "coordinator"}
"""Folders of loop/, each of what runs in one kind of process."""
STARTS = {
    ("driver/run.py", "qurl_ray.loop.rank.entry"),
    ("driver/run.py", "qurl_ray.loop.coordinator.coordinator"),
}
"""The driver hands Ray what the other processes run."""
LOOP = sorted(path for path in (ROOT / "loop").rglob("*.py") if path.parent != ROOT / "loop")


@pytest.mark.parametrize("path", LOOP, ids=lambda path: str(path.relative_to(ROOT)))
def test_processes_of_a_run_share_only_records(path):
    """rank/, driver/ and coordinator/ meet in messages.py, and import nothing of each other."""
    file = path.relative_to(ROOT / "loop")
    others = PROCESSES - {file.parts[0]}
    for name in imported(path):
        of_loop = name.removeprefix("qurl_ray.loop.").split(".")[0] if name.startswith("qurl_ray.loop.") else ""
        assert of_loop not in others or (str(file), name) in STARTS, f"{file} may not import {name}"


def test_reading_a_configuration_needs_neither_torch_nor_ray():
    code = "import sys, qurl_ray.config, qurl_ray.rewards.process; print({'torch', 'ray'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
