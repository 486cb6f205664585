"""Resolve the setting `policy` to a policy that stays the same, and that policy to a folder on this machine."""

from dataclasses import dataclass
from pathlib import Path

from qurl_ray.config.load import runs_folder
from qurl_ray.config.serving import ServingConfig
from qurl_ray.config.tracking import mlflow_address
from qurl_ray.errors import ConfigError
from qurl_ray.report.run_files import read_summary

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
    """URI of MLflow's server or database. Raises as mlflow_address."""
    return mlflow_address(config.mlflow_uri, runs_folder(config.output_dir))


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
    try:
        finished = [
            (path.stat().st_mtime, path.parent)
            for path in folder.glob("*/summary.json")
            if (path.parent / "policy" / "config.json").is_file() and _finished(path.parent)
        ]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; set policy") from None
    if not finished:
        raise ConfigError(f"no run in {folder} has finished: set policy, or output_dir")
    return max(finished)[1]


def _finished(run: Path) -> bool:
    summary = read_summary(run)
    return summary is not None and not summary.get("interrupted", False)


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
    from qurl_ray.tracking.mlflow_client import mlflow_at  # takes over a second, so only if needed

    path = uri.removeprefix(_MODELS)
    with mlflow_at(tracking, f"find {uri} in") as client:
        if "@" in path:
            name, _, alias = path.rpartition("@")
            version = client.get_model_version_by_alias(name, alias).version
        else:
            name, _, version = path.rpartition("/")
            if version == "latest":
                found = client.search_model_versions(f"name='{name}'")
                version = max((int(one.version) for one in found), default=0)
            client.get_model_version(name, str(version))
    return Pinned(source=f"{_MODELS}{name}/{version}", name=name)


def _download(uri: str, tracking: str) -> str:
    from qurl_ray.tracking.mlflow_client import mlflow_at

    name, _, version = uri.removeprefix(_MODELS).rpartition("/")
    with mlflow_at(tracking, f"fetch {uri} from") as client:
        from mlflow.artifacts import download_artifacts

        source = client.get_model_version(name, version).source
        return download_artifacts(source, tracking_uri=tracking, registry_uri=tracking)
