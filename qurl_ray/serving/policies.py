"""Resolve the setting `policy` to a policy that stays the same, and that policy to a folder on this machine."""

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from qurl_ray.config.load import runs_folder
from qurl_ray.config.serving import ServingConfig
from qurl_ray.config.tracking import mlflow_address
from qurl_ray.errors import ConfigError
from qurl_ray.report.run_files import has_finished, read_summary

MODELS = "models:/"
"""Beginning of the address of a registered model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A policy that no later run or version replaces. Small and plain, because it is sent to every replica."""

    source: str
    """Absolute path of a folder, or the URI of a registered version: models:/name/7."""
    name: str
    """Name of the run, the folder or the registered model."""
    folder: str = ""
    """Absolute path of the folder that holds the files; empty if MLflow must fetch them."""
    sha256: str = ""
    """SHA-256 of the names and contents of these files, since others may replace them; empty without a folder."""


def tracking_uri(config: ServingConfig) -> str:
    """URI of MLflow's server or database. Raises as mlflow_address."""
    return mlflow_address(config.mlflow_uri, runs_folder(config.output_dir))


def pin(config: ServingConfig) -> Pinned:
    """Return the policy that `config.policy` means now.

    Raises:
        ConfigError: there is no such policy.
    """
    asked = config.policy
    if asked is not None and asked.startswith(MODELS):
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
    return Pinned(source=str(folder), name=name, folder=str(folder), sha256=_sha256(folder))


def folder_of(pinned: Pinned, uri: str, kept: Path | None) -> Path:
    """Return the folder with the policy's files on this machine. A registered model is fetched if needed.

    Args:
        kept: folder with links to the files; see kept.keep.

    Raises:
        ConfigError: the files are not there, are not those that were pinned, or cannot be fetched.
    """
    links = kept / pinned.sha256 if kept and pinned.sha256 else None
    if links and links.is_dir():
        folder = links
    else:
        folder = Path(pinned.folder or _download(pinned.source, uri))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{pinned.source} holds no policy: config.json is missing")
    if pinned.sha256 and _sha256(folder) != pinned.sha256:
        raise ConfigError(
            f"the files in {folder} have changed since {pinned.source} was chosen: swap to the policy that is meant "
            f"(--swap policy={pinned.source} takes it as it is now)"
        )
    return folder


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


def _registered(uri: str, tracking: str) -> Pinned:
    """Resolve models:/name/latest and models:/name@alias to models:/name/<version>."""
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
    pinned = Pinned(source=f"{MODELS}{name}/{found.version}", name=name)
    place = urlsplit(found.source)
    folder = Path(unquote(place.path))
    if place.scheme not in ("", "file") or not folder.is_absolute() or not folder.is_dir():
        return pinned
    return replace(_in_folder(folder, name), source=pinned.source)


def _download(uri: str, tracking: str) -> str:
    from qurl_ray.tracking.mlflow_client import mlflow_at

    name, _, version = uri.removeprefix(MODELS).rpartition("/")
    with mlflow_at(tracking, f"fetch {uri} from") as client:
        from mlflow.artifacts import download_artifacts

        source = client.get_model_version(name, version).source
        return download_artifacts(source, tracking_uri=tracking, registry_uri=tracking)
