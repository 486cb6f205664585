"""The final policy as a logged model of the MLflow run, which its table of runs shows, and as a registered version of
it with a signature; MLflow loads it as a pipeline or pyfunc."""

import json
import os
import platform
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlparse
from urllib.request import url2pathname

import mlflow.pyfunc
from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.tracking import MlflowClient
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema

from qurl_ray.report.text import storable
from qurl_ray.runs.files import read_summary

FOLDER = "policy"  # name of the folder in the run, and of its logged model
_TAGS = (
    "reward_before",
    "reward_after",
    "reward_after_quantized",
    "accuracy_before",
    "accuracy_after",
    "accuracy_after_quantized",
    "steps",
    "precision_flow",
    "adapter",
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
    """Register a version of the model `name`: the run's logged model, or the folder itself if it is large.

    A run has only one of each: if the run is resumed, the files are replaced, and with them the content of the version.
    """
    folder, name = run_dir / FOLDER, model_name(name)
    tags = policy_tags(run_dir)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    model: LoggedModel | None = None
    source = folder.resolve().as_uri()
    if sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= _COPY_LIMIT_BYTES:
        model = _log_model(client, run_id, folder, tags)
        source = model.artifact_location
    for known in client.search_model_versions(f"run_id='{run_id}'"):
        if (known.name, known.source) == (name, source):
            for key, value in tags.items():
                client.set_model_version_tag(name, known.version, key, value)
            return
    client.create_model_version(name, source, run_id=run_id, tags=dict(tags), model_id=model and model.model_id)


def model_name(text: str) -> str:
    """Return the most similar name that MLflow's registry accepts: letters, digits and _ . - space."""
    return re.sub(r"[^\w.\- ]", "_", text)[:_MAX_MODEL_NAME]


def policy_tags(run_dir: Path) -> Mapping[str, str]:
    """Return the tags of the policy from summary.json; empty if that is absent, or is no JSON object."""
    summary = read_summary(run_dir) or {}
    return {key: storable(str(summary[key])) for key in _TAGS if summary.get(key) is not None}


def _log_model(client: MlflowClient, run_id: str, folder: Path, tags: Mapping[str, str]) -> LoggedModel:
    """Copy the checkpoint to the run's logged model, with the files that MLflow needs to load it. Return the model."""
    run = client.get_run(run_id)
    experiment = run.info.experiment_id
    logged = client.search_logged_models([experiment], filter_string=f"source_run_id='{run_id}'")
    model = next((known for known in logged if known.name == FOLDER), None)
    if model:
        client.set_logged_model_tags(model.model_id, dict(tags))
        client.finalize_logged_model(model.model_id, "FAILED")  # while its files are replaced
    else:
        model = client.create_logged_model(experiment, name=FOLDER, source_run_id=run_id, tags=dict(tags))
    if model.model_id not in {output.model_id for output in run.outputs.model_outputs}:
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    store = urlparse(model.artifact_location)
    if store.scheme == "file" and not store.netloc:  # a folder of this disk gets links: copies would fill it
        shutil.copytree(folder, url2pathname(store.path), copy_function=_linked, dirs_exist_ok=True)
    else:
        client.log_model_artifacts(model.model_id, str(folder))
    with TemporaryDirectory() as made:
        _write_loader(Path(made), folder, run_id, model.model_id)
        client.log_model_artifacts(model.model_id, made)
    client.finalize_logged_model(model.model_id, "READY")
    return model


def _linked(file: str, link: str) -> None:
    Path(link).unlink(missing_ok=True)
    try:
        os.link(file, link)
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, link)


def _write_loader(to: Path, folder: Path, run_id: str, model_id: str) -> None:
    """Write the files that make a checkpoint an MLflow model."""
    tokenizer = to / "components" / "tokenizer"  # mlflow.transformers looks for it here
    tokenizer.mkdir(parents=True)
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copyfile(file, tokenizer / file.name)
    (to / "requirements.txt").write_text("".join(f"{package}=={version(package)}\n" for package in _REQUIREMENTS))
    env = f"python: {platform.python_version()}\nbuild_dependencies: [pip]\ndependencies: [-r requirements.txt]\n"
    (to / "python_env.yaml").write_text(env)
    # MLmodel is written here, because MLflow's own writer loads torch and weights.
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = Model(artifact_path=FOLDER, run_id=run_id, model_id=model_id, signature=SIGNATURE)
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
    (to / "MLmodel").write_text(model.to_yaml())
