"""Resolve the setting `policy` to a policy that stays the same, and that policy to a folder on this machine."""

import hashlib
import shlex
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
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
    """A policy that no later run or version replaces. Small and plain, because it is sent to every replica."""

    source: str
    """Absolute path of a folder, or the URI of a registered version: models:/name/7."""
    name: str
    """Name of the run, the folder or the registered model."""
    folder: str
    """Absolute path of the folder that holds the files; empty if they are downloaded from MLflow."""
    sha256: str
    """SHA-256 of the names and contents of the files, since others may replace them."""


def tracking_uri(config: ServingConfig) -> str:
    """URI of MLflow's server or database. Raises as mlflow_address."""
    return mlflow_address(config.mlflow_uri, runs_folder(config.output_dir))


def pin(config: ServingConfig, kept: Path | None = None, known: Pinned | None = None) -> Pinned:
    """Return the policy that `config.policy` means now.

    Args:
        kept: folder for what is downloaded, in which replicas look for it; see kept.keep.
        known: policy that was pinned before. If it is a version of the registry that `config.policy` still means, it is
            returned, and not downloaded again.

    Raises:
        ConfigError: there is no such policy, or MLflow cannot be reached.
    """
    asked = config.policy
    if asked is not None and asked.startswith(MODELS):
        return _registered(asked, tracking_uri(config), kept, known)
    if asked is None:
        run = _latest_run(runs_folder(config.output_dir))
    elif (expanded(asked) / "config.json").is_file():
        folder = expanded(asked).resolve()
        in_run = (folder.parent / "config.yaml").is_file()
        return _in_folder(folder, folder.parent.name if in_run else folder.name)
    else:
        run = run_folder(asked, config.output_dir).resolve()
    return _in_folder(_of_run(run, config.quantization), run.name)


def _in_folder(folder: Path, name: str) -> Pinned:
    return Pinned(source=str(folder), name=name, folder=str(folder), sha256=_sha256(folder))


def folder_of(pinned: Pinned, uri: str, kept: Path | None) -> Path:
    """Return the folder with the policy's files on this machine. A registered model is downloaded if needed.

    Args:
        kept: folder with the files, or links to them; see kept.keep.

    Raises:
        ConfigError: the files are not there, are not those that were pinned, or cannot be fetched.
    """
    if kept and (kept / pinned.sha256).is_dir():
        folder = kept / pinned.sha256
    else:
        folder = Path(pinned.folder) if pinned.folder else _download(pinned.source, uri)
    check_files(pinned, folder)
    return folder


def check_files(pinned: Pinned, folder: Path) -> None:
    """Raise ConfigError unless the folder holds the files that were pinned. Files that have not changed since the last
    check are not read again."""
    _check_policy(pinned.source, folder)
    if _sha256(folder) != pinned.sha256:
        raise ConfigError(
            f"the files in {folder} have changed since {pinned.source} was chosen: swap to the policy that is meant "
            f"(--swap {shlex.quote(f'policy={pinned.source}')} takes it as it is now)"
        )


def _check_policy(source: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{source} holds no policy: config.json is missing")


def files_of(folder: Path) -> list[Path]:
    """Return the files of a policy: those in the folder and below it that are not hidden."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    try:
        for file in files_of(folder):
            stat = file.stat()
            content = _file_sha256(file, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            digest.update(f"{file.relative_to(folder)} {content}\n".encode())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error}") from None
    return digest.hexdigest()


@lru_cache(maxsize=1024)
def _file_sha256(file: Path, *_: int) -> str:
    """The other arguments tell contents apart, so that a server that follows a policy does not read it every time."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


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
    return summary is not None and has_finished(summary)


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


def _registered(uri: str, tracking: str, kept: Path | None, known: Pinned | None) -> Pinned:
    """Resolve models:/name/latest and models:/name@alias to models:/name/<version>, and pin its files. A server may
    replace the files of a version, so the version alone does not pin them."""
    from qurl_ray.tracking.mlflow_client import mlflow_at  # takes over a second, so only if needed

    path = uri.removeprefix(MODELS)
    with mlflow_at(tracking, f"find {uri} in") as client:
        if "@" in path:
            name, _, alias = path.rpartition("@")
            found = client.get_model_version_by_alias(name, alias)
        else:
            name, _, version = path.rpartition("/")
            if version == "latest":
                versions = client.search_model_versions(f"name='{name}'")
                version = str(max((int(one.version) for one in versions), default=0))
            found = client.get_model_version(name, version)
    source = f"{MODELS}{name}/{found.version}"
    place = urlsplit(found.source)
    folder = Path(unquote(place.path))
    if place.scheme in ("", "file") and folder.is_absolute() and folder.is_dir():
        return replace(_in_folder(folder, name), source=source)
    if known and known.source == source and not known.folder:
        return known
    return Pinned(source=source, name=name, folder="", sha256=_fetch(source, tracking, kept))


def _fetch(uri: str, tracking: str, kept: Path | None) -> str:
    """Download the files of a registered version, and return their SHA-256, which is the name of their folder in
    `kept`. Without `kept` they are deleted: each replica downloads them again, and compares them."""
    with tempfile.TemporaryDirectory(dir=kept, ignore_cleanup_errors=True) as aside:
        folder = _download(uri, tracking, aside)
        _check_policy(uri, folder)
        sha256 = _sha256(folder)
        if kept and not (kept / sha256).is_dir():
            folder.chmod(0o755)  # replicas may be another user's
            folder.rename(kept / sha256)
    return sha256


def _download(uri: str, tracking: str, into: str | None = None) -> Path:
    """Download the files of a registered version into a folder, or into a new temporary one."""
    from qurl_ray.tracking.mlflow_client import mlflow_at

    name, _, version = uri.removeprefix(MODELS).rpartition("/")
    with mlflow_at(tracking, f"fetch {uri} from") as client:
        from mlflow.artifacts import download_artifacts

        source = client.get_model_version(name, version).source
        return Path(download_artifacts(source, dst_path=into, tracking_uri=tracking, registry_uri=tracking))
