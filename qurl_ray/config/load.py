"""From a YAML file and `key.sub=value` overrides to a RunConfig, with errors that say how to mend them."""

import difflib
import os
import re
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from qurl_ray.config.algorithm import CLIP_BOUNDS, PRESETS
from qurl_ray.config.names import meant
from qurl_ray.config.paths import absolute, expanded
from qurl_ray.config.run import RunConfig
from qurl_ray.config.section import DEFAULT_TYPES
from qurl_ray.config.shown import MARK, names_secret, redacted, shortened
from qurl_ray.config.tracking import known_uri
from qurl_ray.config.yaml_text import read_text, read_yaml, read_yaml_file
from qurl_ray.errors import ConfigError
from qurl_ray.extensions import did_you_mean
from qurl_ray.tables import CORRECTIONS

_INSTEAD = {
    "lora": "adapters are settings of learner.lora: rank, alpha, targets (docs/adapters.md)",
    **dict.fromkeys(
        ("num_iterations", "ppo_epochs", "max_epochs"),
        "there is no second pass over the samples of a step: each is used in one update, and "
        "algorithm.updates_per_rollout is the number of these",
    ),
    **dict.fromkeys(
        ("multi_turn", "tools"),
        "rollouts of several turns and tools are settings of environment: environment.type, environment.params and "
        "environment.max_turns (docs/agents.md)",
    ),
    "images": "images are not supported: prompts are text",
}
"""Messages for keys of other frameworks that are not settings here."""
_LONGEST_LINE, _MOST_LINES = 1000, 20
"""Limits of an error's text: a line's in characters, and the number of lines."""


_TYPED = [["model"], ["task"], ["algorithm"], ["algorithm", "correction"]]
"""Sections that have types, by their keys."""
_RANKS = {"type": 0, "objective": 1}
"""Settings that decide which others of their section exist, or their defaults: they are set before these."""
SHIPPED = Path(__file__).parents[1] / "configs"
"""Settings files that come with the package."""


def load_config(path: Path | str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path` (defaults if None), apply overrides, validate.

    Args:
        path: a YAML file, or the name of one that comes with the package, such as `quickstart`.
        overrides: `key=value`, in any order; see read_settings.

    Raises:
        ConfigError: the file is missing or no mapping, an override is no `key=value`, a key is unknown (the nearest
            one is named), a value has the wrong type, or two overrides contradict each other.
    """
    return validated_run(read_settings(path, overrides), str(path) if path else "settings")


def validated_run(settings: dict[str, Any], source: str) -> RunConfig:
    """Return the settings as a RunConfig. `source` says in errors where they come from.

    Raises:
        ConfigError: see load_config.
    """
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain(error, source, _fault)) from None


def read_settings(
    path: Path | str | None, overrides: Sequence[str] = (), model: type[BaseModel] = RunConfig
) -> dict[str, Any]:
    """Read the settings of `path`, if there is one, and apply overrides. They are not validated.

    The order of overrides has no effect: a section is set before its type, and the type before its other settings. A
    new type drops the settings that the file gives its section. If a key is given twice, the last value counts.

    Args:
        model: type of the settings. String settings take the override literally; others are read as YAML.

    Raises:
        ConfigError: the file is missing or no mapping, an override is no `key=value`, or two overrides give a section
            different types.
    """
    settings = _read(path) if path else {}
    assignments = [_parsed(override, model) for override in overrides]
    assignments.sort(key=lambda pair: (len(pair[0]), _RANKS.get(pair[0][-1], len(_RANKS))))
    whole: set[tuple[str, ...]] = set()
    for keys, value in assignments:
        _assign(settings, keys, value, whole)
        whole.add(tuple(keys))
    return settings


def _parsed(override: str, model: type[BaseModel]) -> tuple[list[str], Any]:
    """Return the keys and the value of an override."""
    key, equals, text = override.partition("=")
    label = f"override {shortened(f'{key}={MARK}' if equals and names_secret(key) else redacted(override))!r}"
    if not equals or not key:
        raise ConfigError(f"{label} is not of the form key=value")
    keys = key.split(".")
    types = _annotations(model, keys)
    value: Any = ""
    if text and types and all(set(get_args(kind) or (kind,)) <= {str, type(None)} for kind in types):
        value = read_text(text, f"{label}: the value", nullable=any(type(None) in get_args(kind) for kind in types))
    elif text:
        value = read_yaml(text, f"{label}: the value")
    if keys[0] in DEFAULT_TYPES and len(keys) == 1 and isinstance(value, str):
        keys = [*keys, "type"]  # algorithm=grpo is short for algorithm.type=grpo
    return keys, value


def _annotations(model: type[BaseModel], keys: Sequence[str]) -> list[Any]:
    """Return the types of the setting with these keys, one for each type of its section that has it."""
    models = [model]
    for name in keys[:-1]:
        annotations = [m.model_fields[name].annotation for m in models if name in m.model_fields]
        models = [section for annotation in annotations for section in _sections(annotation)]
    return [m.model_fields[keys[-1]].annotation for m in models if keys[-1] in m.model_fields]


def resolve(config: RunConfig, *, submitted: bool) -> RunConfig:
    """Return the settings with absolute paths, as Ray moves train workers and submitted jobs to temporary folders, and
    with the address of MLflow that is used.

    Args:
        submitted: the driver runs as a Ray job, in a copy of the working directory that is deleted afterwards.

    Raises:
        ConfigError: see runs_folder and known_uri.
    """
    resolved: dict[str, Any] = {"output_dir": runs_folder(config.output_dir, submitted=submitted)}
    tracking = config.tracking
    if tracking.mlflow or tracking.mlflow_uri:
        resolved["tracking"] = tracking.model_copy(update={"mlflow_uri": known_uri(tracking.mlflow_uri)})
    return with_absolute_paths(config).model_copy(update=resolved)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the settings with absolute paths of the model and the problems, where these are on this machine."""
    paths = {"model": ("path",), "task": ("path", "held_out_path")}
    if (lora := config.learner.lora) and lora.path:
        lora = lora.model_copy(update={"path": absolute(lora.path)})
        config = config.model_copy(update={"learner": config.learner.model_copy(update={"lora": lora})})
    resolved = {}
    for name, fields in paths.items():
        section = getattr(config, name)
        update: dict[str, Any] = {}
        for field in fields:
            path = getattr(section, field, None)
            if isinstance(path, dict):  # the paths of several sets
                update[field] = {label: absolute(source) for label, source in path.items()}
            elif path:
                update[field] = absolute(path)
        resolved[name] = section.model_copy(update=update)
    return config.model_copy(update=resolved)


def runs_folder(asked: Path | None, *, submitted: bool = False) -> Path:
    """Absolute path of the folder of runs: `asked`, else $QURL_RUNS, else ./runs (~/qurl-runs for submitted jobs).

    Raises:
        ConfigError: it is a URL. A folder whose name only looks like one can be given by its absolute path.
    """
    folder = asked or os.environ.get("QURL_RUNS") or ("~/qurl-runs" if submitted else "runs")
    if re.match(r"[A-Za-z][\w+.-]+:", str(folder)):  # pathlib makes one slash of two
        raise ConfigError(f"output_dir={folder} is a URL: give a folder that all nodes can write, or mount it")
    return expanded(folder).resolve()


def run_folder(given: str | Path, runs: Path | None = None) -> Path:
    """Return the folder of a run that is given by its path, or by its name in the folder of runs, `runs_folder(runs)`.
    If neither exists, return the path."""
    path = expanded(given)
    return path if path.is_dir() or not (named := runs_folder(runs) / given).is_dir() else named


def describe(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, default, help) of every setting, for --help and the reference in docs/.

    A section's settings come after a row with its key and help, those of one of its types after a row with
    `key.type=…`. These rows have no default.
    """
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        unions = _sections(field.annotation)
        if not unions:
            default = field.get_default(call_default_factory=True)
            shown = "null" if default is None else str(default) or '""'
            yield key, "required" if field.is_required() else shown, " ".join((field.description or "").split())
            continue
        rows = [list(describe(member, f"{key}.")) for member in unions]
        shared = [row for row in rows[0] if len(unions) > 1 and all(row in others for others in rows)]
        if len(unions) > 1:
            yield key, "", " ".join((field.description or "Settings of every type.").split())
            yield from shared  # listed once, and not again for every type
        for member, own in zip(unions, rows, strict=True):
            label = f"{key}.type={member.model_fields['type'].default}" if len(unions) > 1 else key
            yield label, "", " ".join((member.__doc__ or "").split())
            in_label = {f"{key}.type"} if len(unions) > 1 else set()
            yield from (row for row in own if row not in shared and row[0] not in in_label)


def config_file(path: Path | str) -> Path:
    """Return `path`, or the file of that name that comes with the package if there is no such file here."""
    path = Path(path)
    shipped = SHIPPED / f"{path}.yaml"
    return shipped if not path.is_file() and path.name == str(path) and shipped.is_file() else path


def _read(asked: Path | str) -> dict[str, Any]:
    try:
        path = config_file(asked)
        if path.is_dir():
            raise ConfigError(f"config file {path} is a folder: give a YAML file")
        if not path.is_file():
            here = {file.name: str(file) for file in path.parent.glob("*.y*ml")}
            if path.name == str(path):  # it may be the name of a file of the package
                here |= {file.stem: file.stem for file in SHIPPED.glob("*.yaml")}
            nearest = difflib.get_close_matches(path.name, here, n=1)
            hint = f"; did you mean {here[nearest[0]]}?" if nearest else ""
            raise ConfigError(f"config file {path} does not exist{hint}")
        settings = read_yaml_file(path)
    except OSError as error:
        raise ConfigError(f"config file {shortened(str(asked))} cannot be read: {error.strerror}") from None
    if not isinstance(settings, dict):
        holds = "is empty" if settings is None else f"holds {type(settings).__name__}"
        raise ConfigError(f"{path} {holds}, expected a mapping of sections")
    return settings


def _assign(settings: dict[str, Any], keys: list[str], value: Any, whole: Container[tuple[str, ...]]) -> None:
    """Set one value.

    Args:
        whole: keys of earlier overrides. A section among them, or within one, is not the file's.
    """
    *sections, last = keys
    for done, section in enumerate(sections):
        if settings.get(section) is None:  # absent, or a heading with nothing below it
            settings[section] = {}
        if sections[: done + 1] in _TYPED:
            settings[section] = _as_section(section, settings[section])
        settings = settings[section]
        if not isinstance(settings, dict):
            where = ".".join(keys[: done + 1])
            message = f"{where} is a value, not a section: cannot set {'.'.join(keys)}"
            raise ConfigError(shortened(message, _LONGEST_LINE))
    if sections in _TYPED and last in ("type", "objective"):
        of_file = not any(tuple(sections[:end]) in whole for end in range(1, len(keys)))
        if last == "type" and not of_file and value != settings.get(last, value):
            name = ".".join(sections)
            raise ConfigError(f"overrides give {name} two types, {settings[last]} and {value}: give one")
        if last == "type" and of_file and value != settings.get(last, DEFAULT_TYPES[sections[-1]]):
            settings.clear()  # another type has other settings
        if last == "objective" and of_file and value != settings.get(last, "ppo"):
            for bound in CLIP_BOUNDS:  # another objective has other bounds
                settings.pop(bound, None)
    settings[last] = value


def _as_section(name: str, value: Any) -> Any:
    """Return the section that a name stands for, so that one of its settings can be changed."""
    if name not in DEFAULT_TYPES or not isinstance(value, str):
        return value
    if name != "correction":
        return {"type": value}
    if value in PRESETS:
        return PRESETS[value].model_dump()
    return {"type": "custom", "function": value} if ":" in value or value in CORRECTIONS.installed() else value


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a field may hold: [] for plain values, several for a union."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    members = get_args(annotation) or (annotation,)
    return [m for m in members if isinstance(m, type) and issubclass(m, BaseModel)]


def explain(error: ValidationError, source: str, fault: Callable[[Any], str]) -> str:
    """Return one line per error, with its place, the given value and the allowed ones.

    Args:
        source: place from which the settings come, such as a file.
        fault: function that describes an item of `error.errors()`.
    """
    items = error.errors()
    lines = [f"{source}: {shortened(redacted(fault(item)), _LONGEST_LINE)}" for item in items[:_MOST_LINES]]
    return "\n".join(lines + ([f"and {len(items) - _MOST_LINES} more"] if len(items) > _MOST_LINES else []))


def given(item: Any) -> str:
    """Return the value that an error is about, in brackets; "" for a section, and for a value that may hold a
    password."""
    value = item["input"]
    if isinstance(value, dict | BaseModel) or item["loc"][-1:] == ("mlflow_uri",):
        return ""
    return f" (got {shortened(redacted(repr(value)))}){_words_of_yaml(item)}"


def _words_of_yaml(item: Any) -> str:
    """Return how YAML comes to true or false, and what to write instead, for a setting that takes text."""
    value, kind = item["input"], item["type"]
    if not isinstance(value, bool) or kind not in ("literal_error", "string_type", "path_type", "value_error"):
        return ""
    word, other = ("yes", "on") if value else ("no", "off")
    reading = f"; YAML reads {word} as {str(value).lower()}, and {other}"
    if kind == "literal_error":
        return f"{reading}; write none" if not value and "'none'" in item["ctx"]["expected"] else reading
    return reading if kind == "value_error" else f"{reading}; write text in quotes"


def _types_with(key: str) -> Iterator[str]:
    """Yield the types of a section that have the setting `key`: "task.type=dataset"."""
    chosen = ""
    for row, *_ in describe():
        chosen = row if ".type=" in row else chosen
        if row == key and key.startswith(chosen.partition("type=")[0]):
            yield chosen


def _fault(item: Any) -> str:
    key = _dotted([str(part) for part in item["loc"]])
    if item["type"] == "extra_forbidden":
        name = key.split(".")[-1]
        if sentence := _INSTEAD.get("lora" if name.startswith("lora") or name.endswith("peft") else name):
            return sentence
        keys = {row[0].split(".type=")[0] for row in describe()}
        if key in keys:
            return f"{key} is a setting of {' and '.join(_types_with(key))}; see --help {key}"
        for leaf in _leaves(key, item["input"]):
            if (same := meant(leaf)) and same != leaf:
                return f"unknown key {leaf!r}; it is called {same!r} here (--help {same})"
        return f"unknown key {key!r}{did_you_mean(key, keys, cutoff=0.5)}"
    sections = {row.partition(".type=")[0] for row, default, _ in describe() if not default}
    if item["type"] in ("model_type", "model_attributes_type", "dict_type") and key in sections:
        return f"{key}: give {key}.<setting>=… (--help {key} lists them): it is a section, not a value{given(item)}"
    return f"{key or 'config'}: {item['msg'].removeprefix('Value error, ')}{given(item)}"


def _leaves(key: str, value: Any) -> Iterator[str]:
    """Yield the keys of the values in an unknown section, such as those of a settings file of another framework."""
    if not isinstance(value, dict) or not value:
        yield key
        return
    for name, inner in value.items():
        yield from _leaves(f"{key}.{name}", inner)


def _dotted(path: list[str]) -> str:
    """Return the key as a user writes it, without the tags that pydantic adds for unions
    (task.arithmetic.operators)."""
    members: list[type[BaseModel]] = [RunConfig]
    kept = []
    for part in path:
        tagged = [member for member in members if len(members) > 1 and member.model_fields["type"].default == part]
        if tagged:
            members = tagged
            continue
        kept.append(part)
        field = members[0].model_fields.get(part) if members else None
        members = _sections(field.annotation) if field else []
    return ".".join(kept)
