"""Resolve the setting `policy` to a policy that stays the same, and that policy to a folder on this machine."""

import json
from dataclasses import dataclass
from pathlib import Path

from qurl_ray.config.load import runs_folder
from qurl_ray.config.serving import ServingConfig
from qurl_ray.errors import ConfigError

_MODELS = "models:/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A policy that no later run or version replaces. Small and plain, because it is sent to every replica."""

    source: str
    """Absolute path of a folder, or the URI of a registered version: models:/name/7."""
    name: str
    """Name of the run, the folder or the registered model."""
    stamp: int = 0
    """Time when the folder's weights were written, in ns, since another policy may replace them; 0 if not a folder."""


def tracking_uri(config: ServingConfig) -> str:
    """URI of MLflow's server or database."""
    return config.mlflow_uri or f"sqlite:///{runs_folder(config.output_dir) / 'mlflow.db'}"


def pin(config: ServingConfig) -> Pinned:
    """Return the policy that `config.policy` means now.

    Raises:
        ConfigError: there is no such policy.
    """
    asked = config.policy
    if asked is not None and asked.startswith(_MODELS):
        return _registered(asked, tracking_uri(config))
    if asked is None:
        run = _latest_run(runs_folder(config.output_dir))
    elif (Path(asked).expanduser() / "config.json").is_file():
        folder = Path(asked).expanduser().resolve()
        in_run = (folder.parent / "config.yaml").is_file()
        return _in_folder(folder, folder.parent.name if in_run else folder.name)
    else:
        folder = Path(asked).expanduser()
        run = (folder if folder.is_dir() else runs_folder(config.output_dir) / asked).resolve()
    return _in_folder(_of_run(run, config.quantization), run.name)


def _in_folder(folder: Path, name: str) -> Pinned:
    written = max((file.stat().st_mtime_ns for file in folder.glob("*.safetensors")), default=0)
    return Pinned(source=str(folder), name=name, stamp=written)


def folder_of(pinned: Pinned, uri: str) -> Path:
    """Return the folder with the policy's files on this machine. A registered model is fetched if needed.

    Raises:
        ConfigError: the files are not there, or cannot be fetched.
    """
    if not pinned.source.startswith(_MODELS):
        folder = Path(pinned.source)
    else:
        folder = Path(_download(pinned.source, uri))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{pinned.source} holds no policy: config.json is missing")
    return folder


def _latest_run(folder: Path) -> Path:
    finished = [
        (path.stat().st_mtime, path.parent)
        for path in folder.glob("*/summary.json")
        if (path.parent / "policy" / "config.json").is_file() and not _interrupted(path)
    ]
    if not finished:
        raise ConfigError(f"no run in {folder} has finished: set policy, or output_dir")
    return max(finished)[1]


def _interrupted(summary: Path) -> bool:
    try:
        return json.loads(summary.read_text()).get("interrupted", False)
    except ValueError:
        return True


def _of_run(run: Path, quantization: str) -> Path:
    """Return the folder of a run's policy in a format: exported codes if there are some, else full precision."""
    codes = sorted(run.glob("policy-*/config.json"))
    if quantization == "auto" and codes:
        return codes[0].parent
    if (run / f"policy-{quantization}" / "config.json").is_file():
        return run / f"policy-{quantization}"
    if not (run / "policy" / "config.json").is_file():
        raise ConfigError(f"{run} is neither the folder of a model nor that of a run with a saved policy")
    return run / "policy"


def _registered(uri: str, tracking: str) -> Pinned:
    """Resolve models:/name/latest and models:/name@alias to models:/name/<version>."""
    from mlflow.exceptions import MlflowException  # takes over a second, so only if needed
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking, registry_uri=tracking)
    path = uri.removeprefix(_MODELS)
    try:
        if "@" in path:
            name, _, alias = path.rpartition("@")
            version = client.get_model_version_by_alias(name, alias).version
        else:
            name, _, version = path.rpartition("/")
            if version == "latest":
                found = client.search_model_versions(f"name='{name}'")
                version = max((int(one.version) for one in found), default=0)
            client.get_model_version(name, str(version))
    except MlflowException as error:
        raise ConfigError(f"{uri} is not in MLflow at {tracking}: {error.message.splitlines()[0]}") from None
    return Pinned(source=f"{_MODELS}{name}/{version}", name=name)


def _download(uri: str, tracking: str) -> str:
    import mlflow

    name, _, version = uri.removeprefix(_MODELS).rpartition("/")
    try:
        source = mlflow.MlflowClient(tracking, registry_uri=tracking).get_model_version(name, version).source
        return mlflow.artifacts.download_artifacts(source, tracking_uri=tracking, registry_uri=tracking)
    except (mlflow.MlflowException, OSError) as error:
        raise ConfigError(f"{uri} cannot be fetched from {tracking}: {str(error).splitlines()[0]}") from None
