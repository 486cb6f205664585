"""A killed run against an undisturbed one: python benchmarks/resume.py (about 7 minutes on 2 cores).

Runs a preset completely, then again under another name. There the driver gets SIGKILL after half of the steps, or with
--kills at that many random moments, and the same command is started once more after each. Prints how far the final
parameters are apart (0: every bit is equal). Settings may be overridden:
python benchmarks/resume.py learner.backend=deepspeed learner.workers=2
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file
from shared import machine

ROOT = Path(__file__).parents[1]


def command(preset: str, name: str, output_dir: Path, overrides: list[str]) -> list[str]:
    """Return the command of the preset's job."""
    config = f"qurl_ray/configs/{preset}.yaml"
    return [
        sys.executable,
        "jobs/qurl_dapo.py",
        "--config",
        config,
        f"name={name}",
        f"output_dir={output_dir}",
        *overrides,
    ]


def steps_done(run_dir: Path) -> int:
    """Number of steps in metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.is_file() else 0


def kill_at(job: list[str], run_dir: Path, step: int, later_s: float = 0.0) -> int:
    """Start the job, and SIGKILL the driver so many seconds after `step` is reported. Return the number of steps that
    were reported."""
    process = subprocess.Popen(job, cwd=ROOT)
    while steps_done(run_dir) < step:
        if process.poll() is not None:
            raise SystemExit(f"the run ended by itself, with status {process.returncode}")
        time.sleep(0.05)
    time.sleep(later_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return steps_done(run_dir)


def parameters(folder: Path) -> torch.Tensor:
    """Return all parameters of a saved policy, in one row."""
    tensors = load_file(folder / "model.safetensors")
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    preset: Annotated[
        str, typer.Option(help="Name of a file in qurl_ray/configs, for jobs/qurl_dapo.py.")
    ] = "quickstart",
    kills: Annotated[int, typer.Option(help="Kills at random moments; 0 is one kill after half of the steps.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of these moments.")] = 0,
    output_dir: Annotated[Path, typer.Option(help="Where the runs go.")] = ROOT / "runs",
) -> None:
    """Compare an interrupted and resumed run with an undisturbed one."""
    output_dir = output_dir.resolve()
    whole, broken = (command(preset, name, output_dir, overrides or []) for name in ("whole", "broken"))
    subprocess.run([*whole, "--fresh"], cwd=ROOT, check=True)
    planned = json.loads((output_dir / "whole" / "summary.json").read_text())["steps"]
    random = Random(seed)
    # Anywhere between two steps, so that syncs, updates and checkpoints are hit, too.
    moments = [(step, random.random()) for step in sorted(random.sample(range(1, planned), kills))]
    killed_after = []
    for index, (step, later_s) in enumerate(moments or [(planned // 2, 0.0)]):
        job = broken if index else [*broken, "--fresh"]
        killed_after.append(kill_at(job, output_dir / "broken", step, later_s))
    subprocess.run(broken, cwd=ROOT, check=True)
    events = [json.loads(line) for line in (output_dir / "broken" / "metrics.jsonl").read_text().splitlines()]
    found = [event["message"] for event in events if event["message"].startswith("resuming after")]
    summary = json.loads((output_dir / "whole" / "summary.json").read_text())
    first, second = parameters(output_dir / "whole" / "policy"), parameters(output_dir / "broken" / "policy")
    moved = (first - parameters(Path(summary["initial_policy"]))).norm()
    print(f"\n{machine()}\n")
    print(f"driver killed after step {', '.join(map(str, killed_after))}; {'; '.join(found)}")
    print(f"final parameters equal: {torch.equal(first, second)}")
    print(f"distance over distance moved: {(first - second).norm() / moved:.1e}")


if __name__ == "__main__":
    typer.run(main)
