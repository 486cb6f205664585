"""A page as headless Chromium has it after its script has run."""

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
VOID = {"meta", "br", "input", "link", "img"}


def opened(path: Path, profile: Path, view: str = "") -> "Dom":
    """The document of a file, with `view` behind its "#"; `profile` is a folder for the browser's own files."""
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--window-size=1280,900"]
    url = f"{path.resolve().as_uri()}#{view}"
    found = subprocess.run(
        [CHROMIUM, *arguments, "--virtual-time-budget=5000", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "</html>" in found.stdout, found.stderr
    return Dom(found.stdout)


class Dom(HTMLParser):
    """Elements as (tag, attributes, text inside), in the order of their beginnings."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        element = (tag, dict(attrs), [])
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for _, _, texts in self._open:
            texts.append(data)

    def all(self, classes: str = "", *, tag: str = "") -> list[str]:
        """Text of each element with these classes."""
        wanted = set(classes.split())
        return [
            "".join(texts)
            for kind, attributes, texts in self.elements
            if wanted <= set((attributes.get("class") or "").split()) and tag in ("", kind)
        ]

    def text(self, identity: str) -> str:
        """Of the element with this id, white space as one space."""
        (found,) = [texts for _, attributes, texts in self.elements if attributes.get("id") == identity]
        return re.sub(r"\s+", " ", "".join(found)).strip()

    def attribute(self, identity: str, name: str) -> str | None:
        (found,) = [attributes for _, attributes, _ in self.elements if attributes.get("id") == identity]
        return found.get(name)


class Reader:
    """Somebody who presses keys and moves a mouse, through Chromium's debugging port.

    Example:
        with Reader(tmp_path) as reader:
            reader.open(path, "step=3")
            reader.press("ArrowRight")
            assert reader.find("location.hash") == "#step=4"
    """

    def __init__(self, profile: Path) -> None:
        self._profile, self._calls = profile, 0
        self.complaints: list[dict] = []
        """Errors of scripts, and what a page's policy refused."""

    def __enter__(self) -> "Reader":
        client = pytest.importorskip("websockets.sync.client")
        arguments = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"]
        arguments += [f"--user-data-dir={self._profile}", "--remote-debugging-port=0", "about:blank"]
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with ExitStack() as so_far:
            so_far.callback(process.wait, 20)
            so_far.callback(process.terminate)
            self._socket = so_far.enter_context(client.connect(self._page(), max_size=None))
            for domain in ("Runtime", "Log", "Page"):
                self._call(f"{domain}.enable")
            self._open = so_far.pop_all()
        return self

    def _page(self) -> str:
        """Address of the page's debugger."""
        port_file = self._profile / "DevToolsActivePort"
        self._until(lambda: port_file.is_file() and len(port_file.read_text().splitlines()) == 2)
        address = f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}/json"
        pages: list[dict] = []

        def has_page() -> bool:
            pages[:] = [one for one in json.load(urllib.request.urlopen(address)) if one["type"] == "page"]
            return bool(pages)

        self._until(has_page)
        return pages[0]["webSocketDebuggerUrl"]

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def open(self, path: Path, view: str = "") -> None:
        self._call("Page.navigate", url=f"{path.resolve().as_uri()}#{view}")
        self.until(f"location.pathname.endsWith({json.dumps(path.name)}) && document.readyState === 'complete'")

    def find(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait for it to be true."""
        self._until(lambda: self.find(expression))

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key)

    def write(self, text: str) -> None:
        """Into what has the focus."""
        self._call("Input.insertText", text=text)

    def point(self, element: str, *, click: bool = False, wheel: int = 0) -> None:
        """Move the mouse to the middle of an element, an expression; click or turn the wheel there."""
        box = self.find(f"(({element}).getBoundingClientRect()).toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        self._call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        if wheel:
            self._call("Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=wheel, **place)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self._call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def _call(self, method: str, **parameters: Any) -> dict:
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(answer["params"])

    def _until(self, condition: Callable[[], Any]) -> None:
        ends = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < ends, "waited 60 s"
            time.sleep(0.05)
