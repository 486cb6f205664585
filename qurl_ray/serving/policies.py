"""Resolve the setting `policy` to a policy that stays the same, and that policy to a folder on this machine."""

import hashlib
import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from qurl_ray.config.load import run_folder, runs_folder
from qurl_ray.config.paths import expanded
from qurl_ray.config.serving import ServingConfig
from qurl_ray.config.tracking import mlflow_address
from qurl_ray.errors import ConfigError
from qurl_ray.runs.files import has_finished, read_summary

MODELS = "models:/"
"""Beginning of the address of a registered model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A policy that no later run replaces. Small and plain, because it is sent to every replica."""

    source: str
    """Absolute path of a folder, or the URI of a registered version: models:/name/7."""
    name: str
    """Name of the run, the folder or the registered model."""
    folder: str = ""
    """Absolute path of the folder that holds the files; empty if replicas download them from MLflow."""
    sha256: str = ""
    """SHA-256 of the names and contents of the folder's files, since others may replace them."""
    adapters: tuple[tuple[str, str, str], ...] = ()
    """Name for clients, absolute folder and SHA-256 of each adapter beside the policy."""


def pin(config: ServingConfig) -> Pinned:
    """Return the policy that `config.policy` means now.

    Raises:
        ConfigError: there is no such policy, or MLflow cannot be reached.
    """
    adapters = tuple(_adapter(name, path, config) for name, path in sorted(config.adapters.items()))
    asked = config.policy
    if asked is None and adapters:
        first = Path(adapters[0][1])
        asked = json.loads((first / "adapter_config.json").read_text())["base_model_name_or_path"]
    return replace(_policy(asked, config), adapters=adapters)


def _adapter(name: str, asked: str, config: ServingConfig) -> tuple[str, str, str]:
    folder = expanded(asked)
    if not (folder / "adapter_config.json").is_file():
        folder = run_folder(asked, config.output_dir) / "adapter"
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"adapters.{name}={asked} is neither the folder of an adapter nor of a run that trained one")
    folder = folder.resolve()
    return name, str(folder), _sha256(folder)


def _policy(asked: str | None, config: ServingConfig) -> Pinned:
    if asked is not None and asked.startswith(MODELS):
        return _registered(asked, config)
    if asked is None:
        run = _latest_run(runs_folder(config.output_dir))
    elif holds_policy(expanded(asked)):
        folder = expanded(asked).resolve()
        in_run = (folder.parent / "config.yaml").is_file()
        return _in_folder(folder, folder.parent.name if in_run else folder.name)
    else:
        run = run_folder(asked, config.output_dir).resolve()
    return _in_folder(_of_run(run, config.quantization), run.name)


@contextmanager
def files_of(pinned: Pinned, config: ServingConfig) -> Iterator[Path]:
    """Yield the folder with the policy's files on this machine. A registered version may be downloaded for that.

    Raises:
        ConfigError: the files are not there, or cannot be fetched; or they are not those that were pinned, before or
            after they were read.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as aside:
        folder = Path(pinned.folder) if pinned.folder else _download(pinned.source, config, aside)
        if not holds_policy(folder):
            raise ConfigError(f"{pinned.source} holds no policy: config.json is missing")
        check_files(pinned.source, folder, pinned.sha256)
        yield folder
        check_files(pinned.source, folder, pinned.sha256)


def holds_policy(folder: Path) -> bool:
    """Return True if a folder holds a model, or an adapter of one."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def tracking_uri(config: ServingConfig) -> str:
    """Return the address of MLflow's server or database. Raises as mlflow_address."""
    return mlflow_address(config.mlflow_uri, runs_folder(config.output_dir))


def _in_folder(folder: Path, name: str) -> Pinned:
    return Pinned(source=str(folder), name=name, folder=str(folder), sha256=_sha256(folder))


def check_files(source: str, folder: Path, sha256: str) -> None:
    """Raise ConfigError if a folder's files are not those that were pinned; without a digest they are not looked at."""
    if sha256 and _sha256(folder) != sha256:
        raise ConfigError(
            f"the files in {folder} have changed since {source} was chosen: swap to the policy that is meant "
            f"(--swap {shlex.quote(f'policy={source}')} takes it as it is now)"
        )


def _sha256(folder: Path) -> str:
    """Digest of the names and contents of a policy's files: those in the folder and below it that are not hidden."""
    digest = hashlib.sha256()
    try:
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder)
            if file.is_file() and not any(part.startswith(".") for part in name.parts):
                with file.open("rb") as content:
                    digest.update(f"{name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error}") from None
    return digest.hexdigest()


def _latest_run(folder: Path) -> Path:
    try:
        finished = [
            (path.stat().st_mtime, path.parent)
            for path in folder.glob("*/summary.json")
            if (path.parent / "policy" / "config.json").is_file() and has_finished(read_summary(path.parent) or {})
        ]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; set policy") from None
    if not finished:
        raise ConfigError(f"no run in {folder} has finished: set policy, or output_dir")
    return max(finished)[1]


def _of_run(run: Path, quantization: str) -> Path:
    """Return the folder of a run's policy in a format: with "auto", its adapter if it trained one, else exported codes
    if there are some, else full precision."""
    if quantization == "auto" and holds_policy(run / "adapter"):
        return run / "adapter"
    codes = sorted(run.glob("policy-*/config.json"))
    if quantization == "auto" and codes:
        return codes[0].parent
    if (run / f"policy-{quantization}" / "config.json").is_file():
        return run / f"policy-{quantization}"
    if not (run / "policy" / "config.json").is_file():
        raise ConfigError(f"{run} is neither the folder of a model nor that of a run with a saved policy")
    return run / "policy"


# --- MLflow, which takes over a second to import, so only if needed --------------------------------------------------


def _registered(uri: str, config: ServingConfig) -> Pinned:
    """Resolve models:/name/latest and models:/name@alias to models:/name/<version>."""
    from qurl_ray.tracking.mlflow_client import mlflow_at

    path = uri.removeprefix(MODELS)
    with mlflow_at(tracking_uri(config), f"find {uri} in") as client:
        if "@" in path:
            name, _, alias = path.rpartition("@")
            model = client.get_model_version_by_alias(name, alias)
        else:
            name, _, version = path.rpartition("/")
            if version == "latest":
                versions = client.search_model_versions(f"name='{name}'")
                version = str(max((int(entry.version) for entry in versions), default=0))
            model = client.get_model_version(name, version)
    source = f"{MODELS}{name}/{model.version}"
    place = urlsplit(model.source)
    folder = Path(unquote(place.path))
    if place.scheme in ("", "file") and folder.is_absolute() and folder.is_dir():
        return replace(_in_folder(folder, name), source=source)
    return Pinned(source=source, name=name)


def _download(uri: str, config: ServingConfig, into: str) -> Path:
    from qurl_ray.tracking.mlflow_client import mlflow_at

    name, _, version = uri.removeprefix(MODELS).rpartition("/")
    tracking = tracking_uri(config)
    with mlflow_at(tracking, f"fetch {uri} from") as client:
        from mlflow.artifacts import download_artifacts

        source = client.get_model_version(name, version).source
        return Path(download_artifacts(source, dst_path=into, tracking_uri=tracking, registry_uri=tracking))
