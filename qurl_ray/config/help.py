"""Pages of --help: what a command does and which settings it has, a line each, or the settings that are named."""

import difflib
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from typer.core import TyperCommand

from qurl_ray.config.load import describe
from qurl_ray.errors import ConfigError

NARROWEST, WIDEST = 40, 100
"""Bounds on the width of a page, in characters. In between it is the terminal's."""

_INDENT = " " * 4

Row = tuple[str, str, str]
"""(dotted key, default, help) of a setting."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that override the file's; with --help, their names."),
]
"""Argument of a command: settings, or with --help the names of settings and sections."""

HelpFlag = Annotated[
    bool, typer.Option("--help", "-h", help="Show this page, or the settings that are named (see below); stop.")
]
"""Option --help of a command; its parameter is called `show_help`."""


class HelpCommand(TyperCommand):
    """Command whose parameter `show_help` is its --help, which errors then point to."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's own parameters alone."""
        return self.params

    def get_help_option(self, ctx: Any) -> Any:
        """Return the parameter `show_help`."""
        return next(parameter for parameter in self.params if parameter.name == "show_help")


COMMAND: dict[str, Any] = {
    "cls": HelpCommand,
    "add_help_option": False,
    "context_settings": {"max_content_width": WIDEST},
}
"""Arguments of `typer.Typer.command`, for a function with the parameters `overrides` and `show_help` above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpEntry:
    """Settings that a section has with every type, or with one of its types, without those of sections inside it.

    Example:
        HelpEntry(label="model.type=gguf", text="A causal ...", rows=[("model.path", "required", "Path of ...")])
    """

    label: str
    """Dotted key of the section, with its type if it is of one type; empty for settings outside of all sections."""
    text: str
    """Help of the section, or of the type."""
    rows: list[Row] = field(default_factory=list)

    @property
    def section(self) -> str:
        """Dotted key of the section."""
        return self.label.partition(".type=")[0]


def help_page(ctx: typer.Context, model: type[BaseModel], named: Sequence[str], about: str | None) -> str:
    """Return the page of a command, or of the settings that are named after --help.

    Args:
        model: The settings of the command.
        named: Settings and sections by their dotted keys; `all` is every setting. Of `key=value`, the key counts.
        about: Docstring of the job: a sentence, a colon, and an example of use. None shows neither.

    Raises:
        ConfigError: a name is neither a setting nor a section; the nearest ones are named.
    """
    entries = find_entries(model)
    width = max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST))
    if named:
        return "\n\n".join(text for name in named for text in _named(entries, name, width))
    sentence, _, example = (about or "").partition(": ")
    paragraphs = [f"{sentence}.", f"Example: {example}"] if example else []
    outside, *others = entries
    sections = {entry.label: entry.text for entry in others if entry.label == entry.section}
    paragraphs.append(ctx.get_help())
    paragraphs.append("Settings (KEY=VALUE):\n" + _table({key: text for key, _, text in outside.rows}, width))
    if sections:
        paragraphs.append("Sections of settings (SECTION.KEY=VALUE):\n" + _table(sections, width))
    with_types = {entry.section for entry in others if entry.label != entry.section}
    shown = next((entry for entry in others if entry.section not in with_types), outside)
    examples = {"all": "all settings", shown.rows[0][0]: "one setting"}
    if shown.label:
        examples[shown.label] = "the settings of a section"
    requests = {f"--help {name}": text for name, text in reversed(examples.items())}
    paragraphs.append("To see more:\n" + _table(requests, width))
    return "\n\n".join(paragraphs)


def find_entries(model: type[BaseModel]) -> list[HelpEntry]:
    """Return all settings, in the order of the models; the first entry is of those outside of all sections."""
    entries = [HelpEntry(label="", text="")]
    for key, default, text in describe(model):
        if default:
            section = key.rpartition(".")[0]
            next(entry for entry in reversed(entries) if entry.section == section).rows.append((key, default, text))
        else:
            entries.append(HelpEntry(label=key, text=text))
    return entries


def _table(rows: dict[str, str], width: int) -> str:
    """Return a line for each row: its key, and as much of its text's first sentence as fits."""
    column = max(map(len, rows)) + 2
    return "\n".join(
        f"  {key:{column}}{textwrap.shorten(text.split('. ')[0].rstrip('.'), width - column - 2, placeholder=' …')}"
        for key, text in rows.items()
    )


def _named(entries: list[HelpEntry], name: str, width: int) -> Iterator[str]:
    """Yield the paragraphs of a section, of one type of a section, of a setting, or of all settings."""
    of_type = ".type=" in name
    key = name if of_type else name.partition("=")[0].removesuffix(".type")
    if of_type:
        shown = [entry for entry in entries if entry.label == name]
    else:
        shown = [entry for entry in entries if key == "all" or f"{entry.section}.".startswith(f"{key}.")]
    if not shown:
        yield from _one_setting(entries, key, width)
    for entry in shown:
        if entry.label:
            yield _fill(f"[{entry.label}] {entry.text}", width)
        yield from (_setting(row, width) for row in entry.rows)
        if of_type and any(other.label == entry.section and other.rows for other in entries):
            yield f"Settings of every type: --help {entry.section}"


def _one_setting(entries: list[HelpEntry], key: str, width: int) -> Iterator[str]:
    """Yield the paragraphs of a setting: several if it differs between the types of its section."""
    types: dict[Row, list[str]] = {}
    for entry in entries:
        for row in entry.rows:
            if row[0] == key:
                types.setdefault(row, []).extend([entry.label] if entry.label != entry.section else [])
    if not types:
        raise ConfigError(f"--help {key}: there is no such setting or section{_nearest(entries, key)}")
    yield from (_setting(row, width, types=labels) for row, labels in types.items())


def _setting(row: Row, width: int, *, types: Sequence[str] = ()) -> str:
    key, default, text = row
    head = f"{key} ({default})" if default == "required" else f"{key} = {default}"
    noted = f"{head}  [{', '.join(types)}]" if types else head
    return _fill(noted, width, then=_INDENT) + "\n" + _fill(text, width, first=_INDENT, then=_INDENT)


def _fill(text: str, width: int, *, first: str = "", then: str = "") -> str:
    """Return the text in lines, none of which ends within a word: names and values stay whole."""
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )


def _nearest(entries: list[HelpEntry], name: str) -> str:
    """Return a question with the names that resemble `name`, or whose last part does."""
    keys = {key for entry in entries for key in (entry.label, entry.section, *(row[0] for row in entry.rows)) if key}
    named: dict[str, list[str]] = {}
    for key in sorted(keys):
        for ending in {key, key.rpartition(".")[2]}:
            named.setdefault(ending, []).append(key)
    alike = difflib.get_close_matches(name.lower(), named, n=3)
    nearest = list(dict.fromkeys(key for ending in alike for key in named[ending]))[:3]
    return f"; did you mean {' or '.join(map(repr, nearest))}?" if nearest else "; --help alone lists the sections"
