"""A headless Chromium, driven through chromedriver (WebDriver, a W3C recommendation); nothing comes from elsewhere."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

DRIVER = shutil.which("chromedriver")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # nor does the browser itself ask anyone
)  # fmt: skip
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: install chromium to have the page tested")
needs_driver = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no Chromium with chromedriver here: install both to have the page tested"
)
#: Keys as WebDriver writes them.
TAB, ENTER, RIGHT, LEFT, HOME, END, SPACE = "\ue004", "\ue007", "\ue014", "\ue012", "\ue011", "\ue010", " "


class Page:
    """The page that a browser shows."""

    def __init__(self, session: str):
        self.session = session

    def open(self, address: str) -> None:
        _post(f"{self.session}/url", {"url": address})

    def run(self, script: str, *arguments: Any, kind: str = "sync") -> Any:
        """Return what a script returns; of kind "async", what it gives to its last argument."""
        return _post(f"{self.session}/execute/{kind}", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Press and release keys, one after another."""
        pressed = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        _post(f"{self.session}/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": pressed}]})

    def resize(self, width: int, height: int) -> None:
        _post(f"{self.session}/window/rect", {"width": width, "height": height})

    def wait_for(self, script: str, within_s: float = 60.0) -> Any:
        """Return what a script returns once that is true."""
        return waited_for(lambda: self.run(script), lambda: self.run("return document.body.innerText"), within_s)


def waited_for(look: Callable[[], Any], why: Callable[[], Any], within_s: float = 60.0) -> Any:
    """Return what `look` returns once that is true."""
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, why()
        time.sleep(0.1)
    return found


@contextmanager
def browser(folder: Path, *options: str) -> Iterator[Page]:
    """Start a browser with a new profile in `folder`."""
    with _driver() as driver:
        wanted = {
            "browserName": "chrome",
            "timeouts": {"script": 60_000},
            "goog:chromeOptions": {
                "binary": CHROMIUM,
                "args": [*QUIET, f"--user-data-dir={folder / 'profile'}", *options],
            },
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        answer = _post(f"{driver}/session", {"capabilities": {"alwaysMatch": wanted}})
        session = f"{driver}/session/{answer['sessionId']}"
        try:
            yield Page(session)
        finally:
            urllib.request.urlopen(urllib.request.Request(session, method="DELETE"), timeout=60).close()


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Serve the files of a folder from this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *message: object) -> None:
        pass


@contextmanager
def _driver() -> Iterator[str]:
    """Run chromedriver on a port of its choice."""
    assert DRIVER is not None
    with subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            ports = (re.search(r"started successfully on port (\d+)", line) for line in process.stdout)
            yield f"http://127.0.0.1:{next(found[1] for found in ports if found)}"
        finally:
            process.terminate()


def _post(address: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["value"]
