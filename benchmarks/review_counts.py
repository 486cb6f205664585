"""Count what a review of the code looks at: python benchmarks/review_counts.py (seconds).

Prints a Markdown table for qurl_ray and each of its packages: lengths of files, functions and classes, arguments,
annotations, docstrings, comments, tests, and circles of imports; and below it the longest files and functions and the
classes with most methods. The counts are for looking; nothing is a limit. `--out` writes the text to a file;
results are in benchmarks/results/review_counts.md.

- A length is the last line minus the first plus 1, docstring included; p50, p90 and p99 are nearest ranks.
- Functions are all `def`s, also methods and those inside others. Arguments are counted without self and cls.
- A typed function has an annotation of every argument but self and cls, and of what it returns.
- A public name has no underscore in front, and is neither inside a function nor in a private class.
- A comment line holds nothing but a comment.
- Tests of a package are the lines of tests/<package>, those of the whole all lines of tests/.
- A circle is a set of modules each of which imports all others, directly or through others of the set. Imports inside
  functions and under TYPE_CHECKING count.
"""

import ast
import io
import math
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

import networkx
import typer

ROOT = Path(__file__).parents[1]
PACKAGE = "qurl_ray"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A function or a class of a module."""

    name: str
    """Name with those around it: "Fleet.generate"."""
    file: str
    line: int
    length: int
    public: bool
    documented: bool
    arguments: int = 0
    typed: bool = False
    methods: int | None = None
    """Number of functions directly in a class; None for a function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A file of the package."""

    name: str
    """Dotted name: "qurl_ray.rl.objective"."""
    file: str
    lines: int
    comments: int
    """Number of lines that hold nothing but a comment."""
    definitions: tuple[Definition, ...]
    imports: frozenset[str]
    """Dotted names of what the module imports: of `from a import b`, a.b, be it a module or a name of a."""

    @property
    def package(self) -> str:
        """First part of the name below the package; "" for a module directly in it."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 2 or (self.file.endswith("__init__.py") and len(parts) > 1) else ""


def read(source: str, *, name: str, file: str) -> Module:
    """Return what is counted of a module's source."""
    tree = ast.parse(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return Module(
        name=name,
        file=file,
        lines=len(source.splitlines()),
        comments=sum(t.type == tokenize.COMMENT and t.line.lstrip().startswith("#") for t in tokens),
        definitions=tuple(_definitions(tree, file, (), public=True)),
        imports=frozenset(_imports(tree, name if file.endswith("__init__.py") else name.rpartition(".")[0])),
    )


def read_package(root: Path, package: str = PACKAGE) -> list[Module]:
    """Return all modules of the package, in the order of their paths."""
    found = []
    for path in sorted((root / package).rglob("*.py")):
        file = path.relative_to(root)
        name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        found.append(read(path.read_text(encoding="utf-8"), name=name, file=str(file)))
    return found


def _definitions(node: ast.AST, file: str, around: tuple[str, ...], *, public: bool) -> Iterator[Definition]:
    """Yield the definitions below a node, outer ones first. `public` is True if names here can be reached."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.ClassDef):
            yield from _definitions(child, file, around, public=public)
            continue
        names, seen = (*around, child.name), public and not child.name.startswith("_")
        is_class = isinstance(child, ast.ClassDef)
        arguments = [] if is_class else _arguments(child, method=isinstance(node, ast.ClassDef))
        yield Definition(
            name=".".join(names),
            file=file,
            line=child.lineno,
            length=(child.end_lineno or child.lineno) - child.lineno + 1,
            public=seen,
            documented=ast.get_docstring(child) is not None,
            arguments=len(arguments),
            typed=not is_class and child.returns is not None and all(a.annotation for a in arguments),
            methods=sum(isinstance(one, Function) for one in child.body) if is_class else None,
        )
        yield from _definitions(child, file, names, public=seen and is_class)


def _arguments(function: Function, *, method: bool) -> list[ast.arg]:
    """Return the arguments, without the self or cls of a method."""
    given = function.args
    inner = [*given.posonlyargs, *given.args]
    if method and inner and inner[0].arg in ("self", "cls"):
        inner = inner[1:]
    return [*inner, *given.kwonlyargs, *(a for a in (given.vararg, given.kwarg) if a)]


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the dotted names of what a module imports. `package` is the one that it is in, for relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def circles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the circles among modules, each in the order of names, the largest first.

    Args:
        imports: dotted names of what each module imports, modules or their names; what is in no module of `imports`
            is ignored.
    """
    graph = networkx.DiGraph()
    for module, names in imports.items():
        sources = {name if name in imports else name.rpartition(".")[0] for name in names}
        graph.add_edges_from((module, source) for source in sources & imports.keys())
    found = [sorted(part) for part in networkx.strongly_connected_components(graph) if len(part) > 1]
    return sorted(found, key=lambda part: (-len(part), part))


def nearest_rank(values: Iterable[int], share: float) -> int:
    """Return the smallest value that at least `share` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0


def row(modules: Sequence[Module], test_lines: int | None, circular: int) -> dict[str, str]:
    """Return the counts of some modules, by column.

    Args:
        test_lines: number of lines of their tests; None if they have no folder of tests.
        circular: number of circles that one of them belongs to.
    """
    definitions = [one for module in modules for one in module.definitions]
    functions = [one for one in definitions if one.methods is None]
    classes = [one for one in definitions if one.methods is not None]
    public = [one for one in definitions if one.public]
    lines = sum(module.lines for module in modules)

    def ranks(values: Iterable[int], *shares: float) -> str:
        values = list(values)
        return "/".join(str(nearest_rank(values, share)) for share in shares) if values else "–"

    def percent(part: int, whole: int) -> str:
        return f"{100 * part / whole:.1f}" if whole else "–"

    lengths = [one.length for one in functions]
    return {
        "files": f"{len(modules):,}",
        "lines": f"{lines:,}",
        "file p50/p90/max": ranks((module.lines for module in modules), 0.5, 0.9, 1),
        "functions": f"{len(functions):,}",
        "function p50/p90/p99/max": ranks(lengths, 0.5, 0.9, 0.99, 1),
        "> 50": str(sum(length > 50 for length in lengths)),
        "> 100": str(sum(length > 100 for length in lengths)),
        "classes": f"{len(classes):,}",
        "class p50/p90": ranks((one.length for one in classes), 0.5, 0.9),
        "arguments p50/p90": ranks((one.arguments for one in functions), 0.5, 0.9),
        "typed %": percent(sum(one.typed for one in functions), len(functions)),
        "public docstrings %": percent(sum(one.documented for one in public), len(public)),
        "comment lines %": percent(sum(module.comments for module in modules), lines),
        "tests : code": "–" if test_lines is None else f"{test_lines / lines:.2f}" if lines else "–",
        "circles": str(circular),
    }


def report(modules: Sequence[Module], test_lines: Callable[[str | None], int | None]) -> str:
    """Return the Markdown text: the table, and the lists below it.

    Args:
        test_lines: function of a package's name, or None for the whole, that returns the number of lines of its tests.
    """
    found = circles({module.name: module.imports for module in modules})
    names = list(dict.fromkeys(module.package for module in sorted(modules, key=lambda module: module.package)))
    rows = {PACKAGE: row(modules, test_lines(None), len(found))}
    for name in names:
        own = [module for module in modules if module.package == name]
        ours = {module.name for module in own}
        tests = test_lines(name) if name else None
        rows[f"{name}/" if name else "*.py"] = row(own, tests, sum(bool(ours & set(part)) for part in found))
    columns = list(rows[PACKAGE])
    lines = [f"| | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    lines += [f"| {name} | {' | '.join(one.values())} |" for name, one in rows.items()]
    definitions = [one for module in modules for one in module.definitions]
    functions = sorted((one for one in definitions if one.methods is None), key=lambda one: -one.length)
    classes = sorted((one for one in definitions if one.methods), key=lambda one: -(one.methods or 0))
    longest = sorted(modules, key=lambda module: -module.lines)
    parts = {
        "Longest files": [f"{module.file}: {module.lines} lines" for module in longest[:10]],
        "Longest functions": [f"{one.file}:{one.line} {one.name}: {one.length} lines" for one in functions[:5]],
        "Classes with most methods": [
            f"{one.file}:{one.line} {one.name}: {one.methods} methods, {one.length} lines" for one in classes[:5]
        ],
        "Circles of imports": [
            f"{len(part)} modules: {', '.join(name.removeprefix(f'{PACKAGE}.') for name in part)}" for part in found
        ]
        or ["none"],
    }
    for title, entries in parts.items():
        lines += ["", f"**{title}**", "", *(f"- {entry}" for entry in entries)]
    return "\n".join(lines) + "\n"


def lines_below(folder: Path) -> int | None:
    """Return the number of lines of the Python files below a folder; None if it does not exist."""
    if not folder.is_dir():
        return None
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def main(out: Annotated[Path | None, typer.Option(help="Write the text to this file, too.")] = None) -> None:
    """Print the counts of qurl_ray as a Markdown table."""
    text = report(read_package(ROOT), lambda name: lines_below(ROOT / "tests" / (name or "")))
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(f"`python benchmarks/review_counts.py`, {date.today().isoformat()}\n\n{text}")


if __name__ == "__main__":
    typer.run(main)
