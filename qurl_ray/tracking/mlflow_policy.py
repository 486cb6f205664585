"""Registration of the final policy as a model version with a signature; MLflow loads it as a pipeline or pyfunc."""

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

from qurl_ray.report.run_files import read_summary
from qurl_ray.report.text import storable

FOLDER = "policy"  # name of the folder in the run, and of its artifact
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
"""Largest size of a policy that is copied to the artifacts. For larger ones, only the folder is registered."""
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
"""Signature of the model: prompts as input, answers as output, and optional parameters with defaults."""


def register_policy(client: MlflowClient, run_id: str, run_dir: Path, name: str) -> None:
    """Register a version of the model `name`, from the run's artifact policy/, or from the folder if it is large.

    A run has only one version: if the run is resumed, its artifact is replaced, and with it the content of the version.
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
    """Return the most similar name that MLflow's registry accepts: letters, digits and _ . - space."""
    return re.sub(r"[^\w.\- ]", "_", text)[:_MAX_MODEL_NAME]


def policy_tags(run_dir: Path) -> Mapping[str, str]:
    """Return the tags of the policy from summary.json; empty if that is absent, or is no JSON object."""
    summary = read_summary(run_dir) or {}
    return {key: storable(str(summary[key])) for key in _TAGS if summary.get(key) is not None}


def _upload(client: MlflowClient, run_id: str, folder: Path) -> str:
    """Copy the checkpoint, with the files that make it an MLflow model. Return the address of the artifact."""
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
    """Return the text of the MLmodel file. It is written here, because MLflow's own writer loads torch and weights."""
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
