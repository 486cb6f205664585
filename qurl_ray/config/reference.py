"""Write docs/configuration.md from the models: python -m qurl_ray.config.reference > docs/configuration.md"""

import sys
from itertools import pairwise

from qurl_ray.config.load import describe

_HEAD = """# Configuration

Every setting of a run, written by `python -m qurl_ray.config.reference > docs/configuration.md` from
`qurl_ray/config/`. A run is one YAML file (`qurl_ray/configs/` has examples); `section.key=value` on the command
line overrides it, and `--dry-run` prints the result. Unknown keys are errors. Where a section has several types, the
first is the default, and its `type` decides which settings it has, besides those that all of them have."""


def reference() -> str:
    """Return the page: one table per section, and one per type of a section that has several."""
    lines = [_HEAD, *_start_of_table("The run", "")]
    rows = list(describe())
    rows.sort(key=lambda row: not row[1] or "." in row[0])  # settings outside of all sections first
    for (key, default, text), (following, *_) in pairwise([*rows, ("", "", "")]):
        if following.startswith(f"{key}.type="):
            continue  # every setting of the section is of one type alone
        if not default and "." not in key.partition(".type=")[0]:
            lines += _start_of_table(f"`{key}`", text)
        else:  # a section inside a section is a row, so that what follows it stays in its table
            shown = default if default in ("", "required") else f"`{default}`"
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in (f"`{key}`", shown, text)) + " |")
    return "\n".join(lines) + "\n"


def _start_of_table(title: str, text: str) -> list[str]:
    return ["", f"## {title}", "", *([text, ""] if text else []), "| setting | default | |", "|---|---|---|"]


if __name__ == "__main__":
    sys.stdout.write(reference())
