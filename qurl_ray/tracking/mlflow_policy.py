"""The final policy as a version of a registered model with a signature; MLflow loads it as a pipeline or a pyfunc."""

import json
import platform
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import mlflow.pyfunc
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.tracking import MlflowClient
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema

from qurl_ray.tracking.text import storable

FOLDER = "policy"  # of the run, and the artifact that it becomes
_TAGS = (
    "reward_before",
    "reward_after",
    "reward_after_quantized",
    "accuracy_before",
    "accuracy_after",
    "accuracy_after_quantized",
    "steps",
    "precision_flow",
    "quantization",
    "correction",
    "uaq_scale",
)
_COPY_LIMIT_BYTES = 2_000_000_000
"""Policies up to this size are copied to the artifacts; of larger ones the registry only knows the folder."""
_MAX_MODEL_NAME = 250  # the registry's column holds 256
_REQUIREMENTS = ("mlflow", "torch", "transformers", "accelerate")

SIGNATURE = ModelSignature(
    inputs=Schema([ColSpec(DataType.string)]),
    outputs=Schema([ColSpec(DataType.string)]),
    params=ParamSchema(
        [
            ParamSpec("max_new_tokens", DataType.long, 64),
            ParamSpec("do_sample", DataType.boolean, False),
            ParamSpec("return_full_text", DataType.boolean, False),
        ]
    ),
)
"""Prompts in, answers out; what a caller may set besides, with its default."""


def register(client: MlflowClient, run_id: str, run_dir: Path, name: str) -> None:
    """A version of the model `name`, from the run's artifact policy/ or, if large, the folder.

    A run has one version: going on with it replaces the artifact, and so what its version is.
    """
    folder, name = run_dir / FOLDER, model_name(name)
    tags = policy_tags(run_dir)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    if sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= _COPY_LIMIT_BYTES:
        source = _upload(client, run_id, folder)
    else:
        source = folder.resolve().as_uri()
    for known in client.search_model_versions(f"run_id='{run_id}'"):
        if (known.name, known.source) == (name, source):
            for key, value in tags.items():
                client.set_model_version_tag(name, known.version, key, value)
            return
    client.create_model_version(name, source, run_id=run_id, tags=dict(tags))


def model_name(text: str) -> str:
    """The nearest name that MLflow's registry accepts: letters, digits and _ . - space."""
    return re.sub(r"[^\w.\- ]", "_", text)[:_MAX_MODEL_NAME]


def policy_tags(run_dir: Path) -> Mapping[str, str]:
    """What summary.json, if there is one, says of the policy."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except FileNotFoundError:
        return {}
    return {key: storable(str(summary[key])) for key in _TAGS if summary.get(key) is not None}


def _upload(client: MlflowClient, run_id: str, folder: Path) -> str:
    """Copy the checkpoint, with the files that make it a model of MLflow. Returns the address of the artifact."""
    client.log_artifacts(run_id, str(folder), FOLDER)
    for file in folder.iterdir():
        if file.suffix != ".safetensors":  # mlflow.transformers looks for the tokenizer here
            client.log_artifact(run_id, str(file), f"{FOLDER}/components/tokenizer")
    pinned = "".join(f"{package}=={version(package)}\n" for package in _REQUIREMENTS)
    client.log_text(run_id, pinned, f"{FOLDER}/requirements.txt")
    env = f"python: {platform.python_version()}\nbuild_dependencies: [pip]\ndependencies: [-r requirements.txt]\n"
    client.log_text(run_id, env, f"{FOLDER}/python_env.yaml")
    client.log_text(run_id, _mlmodel(folder, run_id), f"{FOLDER}/MLmodel")
    return f"{client.get_run(run_id).info.artifact_uri}/{FOLDER}"


def _mlmodel(folder: Path, run_id: str) -> str:
    """The file that lets MLflow load the checkpoint beside it. Written out: its own writer loads torch and weights."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = Model(artifact_path=FOLDER, run_id=run_id, signature=SIGNATURE)
    model.add_flavor(
        "transformers",
        task="text-generation",
        instance_type="TextGenerationPipeline",
        pipeline_model_type=architecture,
        source_model_name=FOLDER,
        model_binary=".",
        components=["tokenizer"],
        tokenizer_type="AutoTokenizer",
        transformers_version=version("transformers"),
        code=None,
    )
    mlflow.pyfunc.add_to_model(model, loader_module="mlflow.transformers", python_env="python_env.yaml")
    return model.to_yaml()
