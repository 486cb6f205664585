"""Text and files from elsewhere: nothing that is read can run code, and nothing that is shown can act."""

import ast
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from qurl_ray.config import RunConfig
from qurl_ray.config.tracking import TrackingConfig
from qurl_ray.report.report import write_report
from qurl_ray.tracking import Tracker
from qurl_ray.types import Event

ROOT = Path(__file__).parents[1]

# --- what is read --------------------------------------------------------------------------------------------------

RUNS_CODE = {
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "torch.load",
    "torch.jit.load",
    "torch.hub.load",
    "numpy.load",
    "pandas.read_pickle",
    "eval",
    "exec",
    "os.system",
    "os.popen",
}
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
UNSAFE_IF_TRUE = {"trust_remote_code", "allow_pickle", "shell"}
UNSAFE_IF_FALSE = {"weights_only", "autoescape", "use_safetensors"}
INDIRECT = {"load_checkpoint", "VLLM_ALLOW_INSECURE_SERIALIZATION"}
"""DeepSpeed's, which unpickles; what lets vLLM unpickle."""

ALLOWED = {
    ("qurl_ray/config/yaml_text.py", "yaml.load"): "with a loader of plain values, derived from SafeLoader",
    ("qurl_ray/training/coordinator/coordinator.py", "cloudpickle"): "handles that the run's own driver packed",
    ("qurl_ray/rewards/given.py", "cloudpickle"): "a function that this run's own process was given, where it judges",
    ("qurl_ray/transfer/shared_memory.py", "pickle"): "handles of a GPU's memory, between own processes",
}


def hazards(source: str) -> set[str]:
    """Names of what in the source may run code that it reads; an import by another name hides nothing."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
            found |= {a.name for a in node.names} & PICKLES
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            found |= {node.module, *(a.name for a in node.names)} & PICKLES
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            found |= {".".join([names.get(first, first), *rest])} & RUNS_CODE
        if isinstance(node, ast.Attribute):
            found |= {node.attr} & INDIRECT
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & INDIRECT
        elif isinstance(node, ast.keyword) and isinstance(node.arg, str):
            is_true = isinstance(node.value, ast.Constant) and node.value.value is True
            is_false = isinstance(node.value, ast.Constant) and node.value.value is False
            if (node.arg in UNSAFE_IF_TRUE and not is_false) or (node.arg in UNSAFE_IF_FALSE and not is_true):
                found.add(node.arg)
    return found


def test_nothing_that_is_read_can_run_code_but_for_the_places_known():
    files = [path for folder in ("qurl_ray", "jobs", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 80
    found = {(path.relative_to(ROOT).as_posix(), what) for path in files for what in hazards(path.read_text())}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import yaml\nyaml.load(f, Loader=yaml.SafeLoader)", {"yaml.load"}),
        ("from yaml import load as safe\nsafe(f)", {"yaml.load"}),
        ("import numpy as np\nread = np.load", {"numpy.load"}),
        ("import torch\ntorch.load(f)", {"torch.load"}),
        ("import pickle", {"pickle"}),
        ("from cloudpickle import loads", {"cloudpickle"}),
        ("from ray import cloudpickle", {"cloudpickle"}),
        ("AutoModel.from_pretrained(x, trust_remote_code=flag)", {"trust_remote_code"}),
        ("load(f, weights_only=False)", {"weights_only"}),
        ("subprocess.run(command, shell=True)", {"shell"}),
        ("eval(text)", {"eval"}),
        ("model.eval()\nre.compile(p)\nyaml.safe_load(f)\nload(f, weights_only=True)", set()),
    ],
)
def test_hazards_are_seen(source, what):
    assert hazards(source) == what


# --- what is shown -------------------------------------------------------------------------------------------------

HOSTILE = {
    "clear the screen": "a\x1b[2J\x1b[Hb",
    "title and link": "a\x1b]0;owned\x07b\x1b]8;;http://x\x1b\\c",
    "C1": "a\x9b2Jb\x90c\x9cd\x85e",
    "turned around": "a\u202eb\u2066c\u2069d\u200fe",
    "invisible": "a\u200b\ufeff\u00ad\U000e0041b",
    "lines": "a\r\nb\x0bc\x0cd\u2028e\u2029f\x08\x7fg",
    "NUL": "a\0b",
    "half a pair": "a\ud800b",
    "console markup": "[red]a[/red] [/bold] [link=http://x]b[/link] :warning:",
    "HTML": "</script><script>alert(1)</script><img src=x onerror=alert(1)>",
    "template": "{{ 7 * 7 }}{% raw %} ${jndi:ldap://x} %s %(a)s {0.__class__}",
    "formula": "=cmd|' /C calc'!A0",
    "path": "../../../../etc/passwd",
}


def seen_by(folder: Path, text: str, *, mode="plain", mlflow=False) -> tuple[str, str | None]:
    """What the console shows of a run that has `text` wherever foreign text can be, and the id of its MLflow run."""
    settings = TrackingConfig(console=mode, mlflow=mlflow)
    config = RunConfig(name="demo", steps=2, output_dir=folder, tracking=settings)
    terminal = {"force_terminal": mode == "table", "color_system": None, "legacy_windows": False}
    screen = Console(file=io.StringIO(), width=4000, height=60, **terminal)
    sample = {"uid": text, "prompt": text, "answer": text, "expected": text, "reward": 1.0, "status": text}
    summary = {"policy": text, "quantization": text, "phase_seconds": {text: 1.0}, "steps": 2}
    with Tracker(folder / "demo", config, resolved={"task": {text: text}}, console=screen) as tracker:
        tracker.handle(Event(kind="step", step=1, message=text, values={"reward/mean": 0.5, text: 1.0, "note": text}))
        tracker.handle(Event(kind="samples", step=1, values={"samples": [sample | {"tokens": [text, text]}]}))
        tracker.handle(Event(kind="evaluation", step=1, message=text, values={"eval/accuracy": 0.5, text: 1.0}))
        tracker.handle(Event(kind="info", step=1, message=text, values={text: 1.0}))
        tracker.handle(Event(kind="warning", step=1, message=text))
        (folder / "demo" / "config.yaml").write_text(json.dumps({"name": text, "task": {text: [text]}}))
        write_report(folder / "demo")
        tracker.handle(Event(kind="summary", step=2, values=summary))
        run_id = tracker.mlflow_run_id()
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue(), run_id


def printable(text: str) -> str:
    """As console and report replace characters; both keep all others."""
    return "".join("⏎" if char == "\n" else char if char.isprintable() else "·" for char in text)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_log_shows_foreign_text_as_it_is_and_obeys_none_of_it(tmp_path, text):
    shown, _ = seen_by(tmp_path, text)
    assert [char for char in shown if not char.isprintable() and char != "\n"] == []
    assert shown.count(printable(text)) >= 6  # evaluation twice, info, warning, summary


CODE = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])")
"""With parameters and kind, as rich writes them."""


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_live_table_passes_no_code_to_the_terminal_but_its_own(tmp_path, text):
    shown, _ = seen_by(tmp_path, text, mode="table")
    assert printable(text) in shown
    assert {kind for _, kind in CODE.findall(shown)} <= {"A", "K", "h", "l"}  # up, erase line, show and hide the cursor
    assert [char for char in CODE.sub("", shown) if not char.isprintable() and char not in "\r\n"] == []


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_files_hold_foreign_text_exactly_and_print_as_plain_lines(tmp_path, text):
    seen_by(tmp_path, text)
    kept = text.replace("\ud800", "?")  # UTF-8 has no place for half a pair
    for name in ("metrics.jsonl", "samples.jsonl", "report.html"):
        content = (tmp_path / "demo" / name).read_bytes().decode("utf-8")
        assert [char for char in content if not char.isprintable() and char != "\n"] == []
    (sample,) = (json.loads(line) for line in (tmp_path / "demo" / "samples.jsonl").read_text().splitlines())
    assert sample["answer"] == kept
    events = [json.loads(line) for line in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()]
    assert [event["message"] for event in events] == [kept, kept, kept, kept, ""]
    assert "<script>" not in (tmp_path / "demo" / "report.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo"]  # no name became a path


def test_mlflow_takes_foreign_text_of_every_kind(tmp_path):
    """All in one, since MLflow's database takes seconds to make."""
    mlflow = pytest.importorskip("mlflow")
    text = "".join(reversed(HOSTILE.values()))  # a name is cut: the path comes first
    shown, run_id = seen_by(tmp_path, text, mlflow=True)
    assert "MLflow" not in shown.replace("MLflow run", "").replace("MLflow  ", "")  # no complaint
    run = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").get_run(run_id)
    assert run.data.tags["last_warning"] == printable(text)
    (param,) = run.data.params.values()
    assert param == text.replace("\ud800", "?").replace("\0", "?")
    names = {name for name in run.data.metrics if "passwd" in name}
    assert names
    assert not any({"..", ""} & set(name.split("/")) for name in names)
