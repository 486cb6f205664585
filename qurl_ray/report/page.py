"""Rendering of a run's pages. A page is one file that needs no network and no server, and untrusted text is harmless.

Names, prompts and answers are untrusted. Templates escape every value, and data for a script cannot leave its element.
The content security policy of a page forbids everything outside the file: other scripts, and all addresses.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from qurl_ray.report.text import one_line

_FOLDER = Path(__file__).parent
TEXT_LIMIT = 2000
"""Largest number of characters of a name, a setting or a warning."""


def render_page(template: str, *, styles: Sequence[str], script: str = "", **content: Any) -> str:
    """Render a page. Return its text.

    Args:
        template: file name of the template; `styles` and `script` are file names, too.
        content: values for the template; their text is printed without control characters and with limited length.
    """
    style = "".join(_source(name) for name in styles)
    code = _source(script) if script else ""
    policy = f"default-src 'none'; style-src {_digest(style)}; base-uri 'none'; form-action 'none'"
    if code:
        policy += f"; script-src {_digest(code)}"
    return (
        _templates()
        .get_template(template)
        .render(style=Markup(style), script=Markup(code), policy=Markup(policy), **content)
    )


def script_data(value: Any) -> Markup:
    """JSON for a <script type="application/json">. Without "<", no text can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


@cache  # a run has a page per step
def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else one_line(value, TEXT_LIMIT),
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _source(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _digest(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
