"""What the CUDA path asks of vLLM, torch and DeepSpeed is in their wheels for CUDA: names, keywords, operations.

`make gpu-contract` downloads the wheels (1 GB and more) and runs this; it reads them, and installs and runs nothing.
"""

import ast
import os
import re
import tarfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.engines.vllm_cuda import SCHEMAS

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[2]
WHEELS = Path(os.environ.get("QURL_WHEELS", ROOT / ".venv-contract"))
PACKAGES = ("vllm", "torch", "deepspeed")
SOURCES = sorted((ROOT / "qurl_ray").rglob("*.py"))


class Files:
    """The files of a wheel, or of a source distribution as DeepSpeed has one."""

    def __init__(self, path: Path) -> None:
        if path.suffix == ".whl":
            archive = zipfile.ZipFile(path)
            self.names, self.read = set(archive.namelist()), archive.read
            return
        source = tarfile.open(path)  # noqa: SIM115, it is read as long as the tests run
        inside = {member.name.partition("/")[2]: member for member in source.getmembers() if member.isfile()}
        self.names = set(inside)
        self.read = lambda name: source.extractfile(inside[name]).read()


@cache
def files_of(module: str) -> Files:
    package = module.partition(".")[0]
    found = sorted(path for path in WHEELS.glob(f"{package}-*") if path.name != "downloaded")
    assert found, f"nothing of {package} in {WHEELS}: run make gpu-contract"
    return Files(found[-1])


@cache
def tree(module: str) -> ast.Module | None:
    """The syntax tree of a module in its wheel; None if there is none."""
    path, files = module.replace(".", "/"), files_of(module)
    found = next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in files.names), None)
    return ast.parse(files.read(found)) if found else None


def definition(module: str, name: str, depth: int = 0) -> ast.AST | None:
    """The statement that defines a name in a module, through imports of it; None if there is none."""
    body = tree(module)
    if body is None or depth > 6:
        return None
    for node in ast.walk(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) in (name, "*") for a in node.names):
            alias = next(a for a in node.names if (a.asname or a.name) in (name, "*"))
            origin = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package(module)]
                origin = ".".join([*parts, origin]).rstrip(".")
            if origin.partition(".")[0] not in PACKAGES:
                return node if alias.name != "*" else None
            found = definition(origin, name if alias.name == "*" else alias.name, depth + 1)
            if found is not None or alias.name != "*":
                return found or node
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    return None


def is_package(module: str) -> bool:
    return f"{module.replace('.', '/')}/__init__.py" in files_of(module).names


def exists(module: str, name: str) -> bool:
    if definition(module, name) is not None or tree(f"{module}.{name}") is not None:
        return True
    # Names that C++ puts there have only a stub, or none but a mention.
    path = module.replace(".", "/")
    files = files_of(module)
    stubs = {f"{path}.pyi", f"{path}/__init__.pyi", f"{path}/__init__.py", f"{path}.py"} & files.names
    return any(re.search(rf"\b{name}\b", files.read(stub).decode()) for stub in stubs)


def imports() -> Iterator[tuple[str, str, str]]:
    """(our file, module, name) of everything that is imported from the packages."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
                for alias in node.names:
                    yield source.name, node.module or "", alias.name


def keywords() -> Iterator[tuple[str, str, str, str]]:
    """(our file, module, name, keyword) of calls of what is imported from vLLM and DeepSpeed."""
    for source in SOURCES:
        body = ast.parse(source.read_text())
        origin = {}
        for node in ast.walk(body):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("vllm", "deepspeed"):
                origin |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
        for node in ast.walk(body):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in origin:
                yield from ((source.name, *origin[node.func.id], k.arg) for k in node.keywords if k.arg)


def parameters(module: str, name: str) -> set[str] | None:
    """Names of a callable's parameters; None if it takes any keyword or is no function or class."""
    node = definition(module, name)
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        if not made:
            fields = {
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
            for base in node.bases:
                if isinstance(base, ast.Name):
                    fields |= parameters(module, base.id) or set()
            return fields
        node = made[0]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.args.kwarg:
        return None
    return {arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def strings(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def test_everything_that_is_imported_exists():
    found = set(imports())
    assert len(found) > 50
    assert sorted(use for use in found if not exists(*use[1:])) == []


def test_every_keyword_is_taken():
    found = set(keywords())
    assert len(found) > 10
    wrong = {use for use in found if (known := parameters(*use[1:3])) is not None and use[3] not in known}
    assert sorted(wrong) == []


def test_every_engine_argument_exists():
    engine = ast.parse((ROOT / "qurl_ray" / "engines" / "vllm" / "engine.py").read_text())
    keys: set[str] = set()
    for node in ast.walk(engine):
        if isinstance(node, ast.Dict):
            names = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            keys |= names if names & {"worker_extension_cls", "load_format"} else set()
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "self._settings":
            keys |= set(strings(node.slice))
    assert {"enforce_eager", "logprobs_mode"} <= keys
    assert keys - (parameters("vllm.engine.arg_utils", "AsyncEngineArgs") or set()) == set()


def test_every_call_of_the_engine_exists():
    calls = set()
    for name in ("engine.py", "server.py"):
        for node in ast.walk(ast.parse((ROOT / "qurl_ray" / "engines" / "vllm" / name).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr == "control":
                    calls |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
                if ast.unparse(node.func.value) == "self._llm":
                    calls.add(node.func.attr)
    assert {"pause_generation", "collective_rpc"} <= calls
    llm = definition("vllm.v1.engine.async_llm", "AsyncLLM")
    assert isinstance(llm, ast.ClassDef)
    methods = {one.name for one in llm.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert calls - methods == set()


def test_every_variable_that_is_set_is_read():
    known = files_of("vllm").read("vllm/envs.py").decode()
    server = (ROOT / "qurl_ray" / "engines" / "vllm" / "server.py").read_text()
    names = set(re.findall(r'"(VLLM_\w+)"', server))
    assert "VLLM_USE_DEEP_GEMM_E8M0" in names
    assert {name for name in names if f'"{name}"' not in known} == set()


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_operations_have_the_schemas_that_the_tests_give_them(name):
    libraries = [file for file in files_of("vllm").names if re.fullmatch(r"vllm/_C\w*\.(abi3\.)?so", file)]
    assert libraries
    wanted = re.sub(r"\s+", "", name + SCHEMAS[name]).encode()
    found = set()
    for library in libraries:
        found |= set(re.findall(re.escape(name.encode()) + rb"\([^\0]*", files_of("vllm").read(library)))
    found = {re.sub(rb"\s+", b"", one) for one in found}
    assert wanted in found, found
