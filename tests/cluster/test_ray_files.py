"""cluster/h100.yaml and cluster/onprem.yaml, read as `ray up` reads them."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from qurl_ray import __version__

ROOT = Path(__file__).parents[2]
FILES = ["h100", "onprem"]


def config(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / f"cluster/{name}.yaml").read_text())


def commands(section: dict[str, Any]) -> list[str]:
    """All shell commands of a file, also those of node types."""
    own = [command for key, value in section.items() if key.endswith("_commands") for command in value]
    types = section.get("available_node_types", {}).values()
    return own + [command for node_type in types for command in commands(node_type)]


def start(name: str, role: str) -> str:
    return next(command for command in config(name)[f"{role}_start_ray_commands"] if "ray start" in command)


@pytest.mark.parametrize("name", FILES)
def test_ray_takes_it(name):
    prepared = prepare_config(config(name))
    validate_config(prepared)
    worker = next(kind for kind in prepared["available_node_types"] if kind != "head")
    assert prepared["available_node_types"][worker]["max_workers"] > 0
    for role in ("head", "worker"):  # and none of Ray's defaults, which install another Ray
        assert not any("ray-wheels" in command for command in prepared[f"{role}_setup_commands"])


def test_ray_refuses_an_unknown_key():
    with pytest.raises(Exception, match="worker_command"):
        validate_config(prepare_config(config("onprem") | {"worker_command": []}))


@pytest.mark.parametrize("name", FILES)
def test_commands_are_shell(name):
    assert len(commands(config(name))) >= 4
    for command in commands(config(name)):
        checked = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("name", FILES)
def test_what_is_mounted_is_there_and_a_job_finds_it(name):
    mounts = config(name)["file_mounts"]
    assert mounts.pop("~/.ray/auth_token") == "~/.ray/auth_token"
    for remote, local in mounts.items():
        assert (ROOT / local).exists()
        assert remote == f"~/qurl-ray/{local}"
    assert {"qurl_ray", "jobs"} <= set(mounts.values())
    for role in ("head", "worker"):
        assert "cd ~/qurl-ray && ray start" in start(name, role)


@pytest.mark.parametrize("name", FILES)
def test_head_and_workers_meet(name):
    assert re.search(r"--head --port=(\d+)", start(name, "head"))[1] == "6379"
    assert "--address=$RAY_HEAD_IP:6379" in start(name, "worker")
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start(name, "head")
    for role in ("head", "worker"):
        assert "unset OMP_NUM_THREADS" in start(name, role)


@pytest.mark.parametrize("name", FILES)
def test_every_node_asks_for_the_token_and_keeps_files_on_shared_storage(name):
    text = (ROOT / f"cluster/{name}.yaml").read_text()
    environment = dict(re.findall(r"\b([A-Z_]+)=([^\s']+)", text))
    assert environment["RAY_AUTH_MODE"] == "token"
    for variable in ("QURL_RUNS", "QURL_CACHE", "HF_HOME"):
        assert environment[variable].startswith("/mnt/shared/")


def test_p5_has_efa_on_each_of_its_32_network_cards_and_one_interface_for_ip():
    node = config("h100")["available_node_types"]["h100"]["node_config"]
    interfaces = node["NetworkInterfaces"]
    places = [(one["NetworkCardIndex"], one["DeviceIndex"]) for one in interfaces]
    assert len(set(places)) == len(places) == 33
    efa = [one for one in interfaces if one.get("InterfaceType") == "efa-only"]
    assert sorted(one["NetworkCardIndex"] for one in efa) == list(range(32))
    assert [place for place, one in zip(places, interfaces, strict=True) if one not in efa] == [(0, 0)]
    # Ray refuses interfaces without these, or a node_config that repeats them.
    assert all(one["SubnetId"] and one["Groups"] for one in interfaces)
    assert not {"SubnetId", "SubnetIds", "SecurityGroupIds"} & node.keys()


def test_containers_may_use_gpus_and_efa_and_see_the_mounts():
    docker = config("h100")["docker"]
    assert docker["image"].endswith(f"/qurl-ray:{__version__}")
    assert {"--gpus=all", "--device=/dev/infiniband"} == set(docker["worker_run_options"])
    assert "--ulimit=memlock=-1:-1" in docker["run_options"]
    host = "\n".join(config("h100")["initialization_commands"])
    for option in docker["run_options"]:
        if option.startswith("--volume="):
            assert option.removeprefix("--volume=").split(":")[0] in host


def test_the_documentation_names_what_is_there():
    text = (ROOT / "docs/clusters.md").read_text()
    named = set(re.findall(r"(?:cluster|jobs|tests)/[\w./]+\w", text))
    assert {f"cluster/{name}.yaml" for name in FILES} <= named
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert f"/qurl-ray:{__version__}" in text
