"""Scripts that take long are seldom run: what they import from here, and from each other, must be there."""

import ast
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def defined(path: Path) -> set[str]:
    """Names at the top of a script."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_is_there(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        wanted, sibling = {alias.name for alias in node.names}, FOLDER / f"{node.module}.py"
        if sibling.exists():
            assert wanted <= defined(sibling), node.module
        elif node.module.startswith("qurl_ray"):
            module = importlib.import_module(node.module)
            for name in wanted:
                assert hasattr(module, name) or importlib.import_module(f"{node.module}.{name}")
