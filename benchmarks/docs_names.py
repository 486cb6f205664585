"""List what the documentation named at a commit and names no more: python benchmarks/docs_names.py COMMIT

Settings, metrics, error classes, quoted messages, commands and their options, from all pages of then, are looked for
in all pages of the working tree (both without the lab book and the changelog). Prints the missing ones, by kind, and
exits with 1 if there are any. For use after the documentation was rewritten.
"""

import re
import subprocess
import sys
from typing import Annotated

import typer
from shared import ROOT

from qurl_ray import errors
from qurl_ray.config import RunConfig
from qurl_ray.config.load import describe
from qurl_ray.config.serving import ServingConfig

LEFT_OUT = ("docs/LOG.md", "CHANGELOG.md")
"""Pages that say what was."""
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages(commit: str | None) -> str:
    """Return the text of all pages, of a commit or of the working tree."""
    listing = ["git", "ls-files"] if commit is None else ["git", "ls-tree", "-r", "--name-only", commit]
    names = [name for name in _output(listing).split() if re.fullmatch(r"docs/\w[\w-]*\.md|[A-Z]+\.md", name)]
    wanted = [name for name in names if name not in LEFT_OUT]
    if commit is None:
        return "\n".join((ROOT / name).read_text() for name in wanted if (ROOT / name).exists())
    return "\n".join(_output(["git", "show", f"{commit}:{name}"]) for name in wanted)


def named(text: str) -> dict[str, set[str]]:
    """Return what the text names, by kind."""
    commands = re.compile(r"\b(?:jobs|benchmarks|cluster)/[\w/]+\.\w+|make \w+")
    settings = {key for section in (RunConfig, ServingConfig) for key, _, _ in describe(section)}
    code = "\n".join([*CODE.findall(text), *FENCE.findall(text)])
    words = set(re.findall(r"[\w.]+", text))
    quoted = {span for span in CODE.findall(text) if span.count(" ") > 2 and not re.search(r"[=/|]|--", span)}
    return {
        "settings": settings & words,
        "metrics": set(re.findall(r"(?<![\w./])[a-z]+/[a-z_]+@?\w*(?![\w./])", code)),
        "errors": {name for name in vars(errors) if name in words and name[0].isupper()},
        "messages": quoted,
        "commands": set(commands.findall(code)),
        "options": set(re.findall(r"(?<!\w)--[a-z][a-z-]+", code)),
    }


def _output(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main(commit: Annotated[str, typer.Argument(help="The commit with the pages as they were.")]) -> None:
    """Print what the documentation named at a commit and does not name any more."""
    now = pages(None)
    lost = {kind: sorted(name for name in names if name not in now) for kind, names in named(pages(commit)).items()}
    for kind, names in lost.items():
        print(f"{kind}: {len(names)} missing")
        print("".join(f"  {name}\n" for name in names), end="")
    sys.exit(any(lost.values()))


if __name__ == "__main__":
    typer.run(main)
