"""Plain English, as far as a script can see it: how docstrings begin, words that only this project would use, and names
with several meanings."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.runs import ROOT

CODE = sorted(path for folder in ("qurl_ray", "jobs", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
DANGLING = re.compile(r"\s*(Of|That|Those|What|Whether)\b")
"""A docstring that begins so is no sentence, and says nothing when it is read alone."""
INSTEAD = {
    r"\banew\b": "again, restarts",
    r"\b(go|goes|going|gone) on (with|from)\b": "continues, resumes",
    r"\bcrews?\b": "worker group",
    r"\bguests?\b": "colocated engines",
    r"\bparcels?\b": "chunk, shard",
    r"\bpulses?\b": "heartbeat",
    r"\bunasked\b": "without a request",
    r"\bwhoever asks\b": "the caller",
    r"\bwhat becomes? of\b": "the result",
}
"""Standard words for private ones."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each string that stands alone: docstrings, also those under a field."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def private(text: str) -> list[str]:
    return [f"{m[0]!r}: {word}" for pattern, word in INSTEAD.items() for m in re.finditer(pattern, text, re.IGNORECASE)]


def test_docstrings_begin_with_a_sentence_or_a_noun():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()[:60]}"
        for path in CODE
        for line, text in docstrings(path)
        if DANGLING.match(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["qurl_ray", "jobs", "benchmarks"])
def test_code_uses_standard_words(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in CODE
        if path.relative_to(ROOT).parts[0] == folder
        for line, text in (*docstrings(path), *comments(path))
        for word in private(text)
    ]
    assert not found, "\n".join(found)


def test_pages_use_standard_words():
    """The lab book is a record: it stays as it was written."""
    pages = [page for page in PAGES if page.name != "LOG.md"]
    found = [f"{page.relative_to(ROOT)}: {word}" for page in pages for word in private(page.read_text())]
    assert not found, "\n".join(found)


SHARED = {
    "main": "the function that runs a module of its own as a command",
}
"""Public names that several modules define, with the reason."""


def public_names(path: Path) -> Iterator[str]:
    """Classes, functions, type aliases and type variables at the top level of a module, without private names."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):  # constants are not in CamelCase
            targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
            names = [name for name in targets if name[0].isupper() and not name.isupper()]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def several_meanings(root: Path) -> dict[str, list[str]]:
    """Modules of each public name that more than one module below `root` defines."""
    modules: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for name in set(public_names(path)):  # a module may define a name twice, under two conditions
            modules.setdefault(name, []).append(str(path.relative_to(root)))
    return {name: found for name, found in modules.items() if len(found) > 1}


def test_a_public_name_has_one_meaning():
    found = several_meanings(ROOT / "qurl_ray")
    assert {name: where for name, where in found.items() if name not in SHARED} == {}
    assert not [name for name in SHARED if name not in found], "not shared any more"


def test_the_check_finds_what_it_is_for(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(
        'class A:\n    """Whether it goes on with that."""\n\n    b = 1  # the crew, anew\n    """Of each."""\n'
    )
    assert [line for line, text in docstrings(file) if DANGLING.match(text)] == [2, 5]
    assert private(next(text for _, text in comments(file))) == ["'anew': again, restarts", "'crew': worker group"]
    assert private("It goes on with the next.") == ["'goes on with': continues, resumes"]
    (tmp_path / "a.py").write_text("class Row: ...\ndef main(): ...\nLIMIT = 1\n_Row = Kind = int\ndef _row(): ...\n")
    (tmp_path / "b.py").write_text("Row = int\nasync def main(): ...\nLIMIT = 2\nclass Kind: ...\ndef _row(): ...\n")
    assert several_meanings(tmp_path) == {name: ["a.py", "b.py"] for name in ("Row", "main", "Kind")}
