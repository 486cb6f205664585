"""cluster/onprem.yaml as a user has it: `ray up`, `ray job submit`, `ray down`, on machines made of namespaces.

`ray up` and `ray down` run `ray stop`, which ends every Ray process that it can see: never outside a PID namespace.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
NEEDED = ["sshd", "rsync", "ip", "unshare", "nsenter"]
SMALL = [
    "steps=1",
    "model.cold_start=false",
    "model.layers=1",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=2",
    "evaluation.problems=8",
    "tracking.mlflow=false",
    "tracking.console=none",
]

Run = Callable[..., subprocess.CompletedProcess]


def missing() -> list[str]:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return [name for name in NEEDED if not shutil.which(name, path=path)]


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Run]:
    """Runs commands on a machine that reaches 10.0.0.1 and 10.0.0.2 by ssh; `tmp_path` is /mnt/shared on all three."""
    namespaces = ["--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net"]
    keep = {str(ROOT), sys.prefix, sys.base_prefix}
    machines = subprocess.Popen(
        ["unshare", *namespaces, ROOT / "tests/cluster/machines.sh", tmp_path, *keep],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    first = machines.stdout.readline()
    assert first == "ready\n", first + machines.communicate()[0]
    init = Path(f"/proc/{machines.pid}/task/{machines.pid}/children").read_text().strip()
    environment = {
        "HOME": os.environ["HOME"],
        "PATH": f"{Path(sys.prefix, 'bin')}:/usr/sbin:/usr/bin:/sbin:/bin",
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:8265",
    }

    def run(command: str, **more: str) -> subprocess.CompletedProcess:
        inside = ["nsenter", "--all", f"--target={init}", "bash", "-c", f"cd {ROOT}; {command}"]
        return subprocess.run(inside, env=environment | more, capture_output=True, text=True, timeout=420, check=False)

    yield run
    machines.kill()
    machines.wait()


def loopback(path: Path) -> None:
    """The shipped file for these machines: their user, one worker, and this environment instead of an installed one."""
    config = yaml.safe_load((ROOT / "cluster/onprem.yaml").read_text())
    config["auth"]["ssh_user"] = "root"
    config["provider"]["worker_ips"] = ["10.0.0.2"]
    made = [command for command in config["setup_commands"] if "bin/p" in command]
    assert len(made) == 2, "setup_commands that make ~/qurl-venv"
    config["setup_commands"] = [
        f"ln -sfn {sys.prefix} ~/qurl-venv",
        *(command for command in config["setup_commands"] if command not in made),
    ]
    path.write_text(yaml.safe_dump(config))


def ray_processes(laptop: Run) -> list[str]:
    """Of all machines: the laptop's PID namespace holds theirs."""
    names = laptop("cat /proc/[0-9]*/comm").stdout.splitlines()
    return [name for name in names if name.startswith(("raylet", "gcs_server", "ray::"))]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
@pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}")
def test_up_submit_down(laptop, tmp_path):
    loopback(tmp_path / "onprem.yaml")
    file = "/mnt/shared/onprem.yaml"
    assert laptop("ray get-auth-token --generate").returncode == 0

    up = laptop(f"ray up -y {file}")
    assert up.returncode == 0, up.stdout + up.stderr
    laptop(f"nohup ray dashboard {file} >/mnt/shared/dashboard.log 2>&1 & sleep 5")

    count = "import ray; ray.init(); print(sum(node['Alive'] for node in ray.nodes()), 'nodes')"
    for _ in range(12):
        nodes = laptop(f'ray job submit -- python -c "{count}"')
        if "2 nodes" in nodes.stdout:
            break
    else:
        raise AssertionError(nodes.stdout + nodes.stderr)

    refused = laptop("ray job list", RAY_AUTH_TOKEN="0" * 32)
    assert refused.returncode != 0
    assert "token" in (refused.stdout + refused.stderr).lower()

    job = laptop(
        f"ray job submit -- python jobs/qurl_dapo.py --config qurl_ray/configs/quickstart.yaml {' '.join(SMALL)}"
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert "succeeded" in job.stdout
    summary = json.loads((tmp_path / "qurl-runs/quickstart/summary.json").read_text())
    assert not summary["interrupted"]

    assert ray_processes(laptop).count("raylet") == 2
    down = laptop(f"ray down -y {file}")
    assert down.returncode == 0, down.stdout + down.stderr
    assert "gcs_server" not in ray_processes(laptop)
    started = time.monotonic()
    while ray_processes(laptop):  # the worker's raylet ends when it finds that the head is gone
        assert time.monotonic() - started < 240, down.stdout + down.stderr
        time.sleep(1)
