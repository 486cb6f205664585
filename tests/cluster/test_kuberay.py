"""cluster/kuberay/ against what KubeRay's custom resources require and know."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from ray.serve.schema import ServeDeploySchema

from qurl_ray import __version__
from qurl_ray.config.load import load_config
from tests.cluster.pins import pins

ROOT = Path(__file__).parents[2]
FILES = {"train": "rayClusterSpec", "serve": "rayClusterConfig"}

# Required and known fields of ray.io/v1 as in ray-operator/config/crd/bases of KubeRay 1.5.1, 1.6.2 and 1.7.0, and of
# Kubernetes' pods. An API server drops what it does not know without a word. Of the known ones, those used here.
FIELDS = {
    "RayJob": (
        {"entrypoint", "rayClusterSpec"},
        {"shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "submitterConfig"},
    ),
    "RayService": ({"rayClusterConfig", "serveConfigV2"}, set()),
    "cluster": (
        {"headGroupSpec"},
        {"rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions", "workerGroupSpecs"},
    ),
    "head": ({"template", "rayStartParams"}, set()),
    "worker": ({"groupName", "minReplicas", "maxReplicas", "template", "rayStartParams"}, {"replicas"}),
    "pod": ({"containers"}, {"volumes", "securityContext", "tolerations"}),
    "container": ({"name", "image", "resources"}, {"env", "ports", "volumeMounts"}),
    "volumeMount": ({"name", "mountPath"}, set()),
}


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / f"cluster/kuberay/{name}.yaml").read_text())


def cluster(name: str) -> dict[str, Any]:
    return manifest(name)["spec"][FILES[name]]


def groups(name: str) -> Iterator[dict[str, Any]]:
    yield cluster(name)["headGroupSpec"]
    yield from cluster(name)["workerGroupSpecs"]


def pods(name: str) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in groups(name)]


def containers(name: str) -> list[dict[str, Any]]:
    return [container for pod in pods(name) for container in pod["containers"]]


def parts(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what of FIELDS it is, itself)."""
    yield manifest(name)["kind"], manifest(name)["spec"]
    yield "cluster", cluster(name)
    head, *workers = groups(name)
    yield "head", head
    yield from (("worker", worker) for worker in workers)
    yield from (("pod", pod) for pod in pods(name))
    yield from (("container", container) for container in containers(name))
    yield from (("volumeMount", mount) for container in containers(name) for mount in container["volumeMounts"])


@pytest.mark.parametrize("name", FILES)
def test_required_fields_are_there_and_all_are_known(name):
    assert manifest(name)["apiVersion"] == "ray.io/v1"
    for kind, part in parts(name):
        required, known = FIELDS[kind]
        assert required <= part.keys() <= required | known, f"{kind}: {sorted(part)}"


@pytest.mark.parametrize("name", FILES)
def test_volumes_are_defined_and_shared_storage_is_where_the_environment_says(name):
    for pod in pods(name):
        defined = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts.keys() == defined
            environment = {one["name"]: one.get("value") for one in container["env"]}
            for variable in ("QURL_RUNS", "QURL_CACHE", "HF_HOME"):
                assert environment[variable].startswith(mounts["shared"] + "/")


@pytest.mark.parametrize("name", FILES)
def test_gpus_and_memory_are_requested_as_they_are_limited(name):
    for container in containers(name):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert all(requests[resource] == limit for resource, limit in limits.items())
        assert "memory" in limits
    head, *workers = containers(name)
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    assert all("nvidia.com/gpu" in worker["resources"]["limits"] for worker in workers)


@pytest.mark.parametrize("name", FILES)
def test_versions_are_the_package_s(name):
    assert cluster(name)["rayVersion"] in SpecifierSet(pins()["ray"])
    assert {container["image"] for container in containers(name)} == {f"CHANGE-ME/qurl-ray:{__version__}"}


@pytest.mark.parametrize("name", FILES)
def test_a_token_is_asked_for(name):
    assert cluster(name)["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("name", FILES)
def test_worker_groups_have_room(name):
    for group in cluster(name)["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    if not cluster(name).get("enableInTreeAutoscaling"):
        assert all(group["minReplicas"] == group["maxReplicas"] for group in cluster(name)["workerGroupSpecs"])


def test_the_job_is_one_of_the_repository_and_fits():
    python, job, option, file = shlex.split(manifest("train")["spec"]["entrypoint"])
    assert (python, option) == ("python", "--config")
    assert (ROOT / job).is_file()
    config = load_config(Path(file))
    (workers,) = cluster("train")["workerGroupSpecs"]
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert config.learner.device == "cuda"
    assert config.learner.workers <= gpus * workers["maxReplicas"]


def test_the_app_is_one_that_ray_serve_takes_with_the_codes_that_the_run_exports():
    """tests/serving/test_vllm.py runs it, on a CPU."""
    deployed = ServeDeploySchema.model_validate(yaml.safe_load(manifest("serve")["spec"]["serveConfigV2"]))
    (application,) = deployed.applications
    (llm,) = application.args["llm_configs"]
    trained = load_config(Path(shlex.split(manifest("train")["spec"]["entrypoint"])[-1]))
    environment = {one["name"]: one.get("value") for one in containers("train")[0]["env"]}
    exported = trained.export.format(trained.rollout.quantization)
    assert llm["model_loading_config"]["model_source"] == (
        f"{environment['QURL_RUNS']}/{trained.name}/policy-{exported}"
    )
    head, _ = containers("serve")
    assert deployed.http_options.port in [one["containerPort"] for one in head["ports"]]
    replicas = llm["deployment_config"]["autoscaling_config"]["max_replicas"]
    assert replicas <= cluster("serve")["workerGroupSpecs"][0]["maxReplicas"]
