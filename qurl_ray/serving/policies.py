"""Which policy is meant: from a setting to one that stays the same, and from that to a folder on this machine."""

import json
from dataclasses import dataclass
from pathlib import Path

from qurl_ray.config.load import runs_folder
from qurl_ray.config.serving import ServingConfig
from qurl_ray.errors import ConfigError

_MODELS = "models:/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A policy that no later run or version takes the place of. Small and plain: it travels to every replica."""

    source: str
    """Absolute folder, or models:/name/7."""
    name: str
    """What it is called."""
    stamp: int = 0
    """When the folder's weights were written: another policy may take the place of one."""


def tracking_uri(config: ServingConfig) -> str:
    """MLflow's server or database."""
    return config.mlflow_uri or f"sqlite:///{runs_folder(config.output_dir) / 'mlflow.db'}"


def pin(config: ServingConfig) -> Pinned:
    """What `config.policy` means now.

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
    """Where its files are on this machine; those of a registered model are fetched if need be.

    Raises:
        ConfigError: they are not there.
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
    """The policy of a run in the format: exported codes if there are some, else the one in full precision."""
    codes = sorted(run.glob("policy-*/config.json"))
    if quantization == "auto" and codes:
        return codes[0].parent
    if (run / f"policy-{quantization}" / "config.json").is_file():
        return run / f"policy-{quantization}"
    if not (run / "policy" / "config.json").is_file():
        raise ConfigError(f"{run} is neither the folder of a model nor of a run that has saved its policy")
    return run / "policy"


def _registered(uri: str, tracking: str) -> Pinned:
    """models:/name/latest and models:/name@alias as models:/name/<version>."""
    from mlflow.exceptions import MlflowException  # over a second, for those who want it
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
