"""`python -m docs.rendered SITE` looks at the pages as Chromium draws them, at 390 and 1280 pixels, light and dark.

No table loses its last column: it fits, or scrolls in a box that says so. Texts, those of drawings included, have a
contrast of 4.5 to 1 and more with what is behind them; pictures are there and have a description. A search has excerpts
and puts pages before attributes; a pasted message is found on its page. Where there is no Chromium, a line says that
nothing was looked at.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any

#: What the browser may be called, the first that is installed is taken.
BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
OPTIONS = (
    "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--window-size=1400,1000",
)  # fmt: skip
SEARCHES = ("bucket_size", "overlap", "checkpoint")
#: How long all pages may take.
LIMIT_S = 900.0
_FRAME = '<!DOCTYPE html><iframe style="height: 900px; border: 0"></iframe><script src="/rendered.js"></script>'


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, and beside it the page that looks at it, whose findings it takes."""

    def __init__(self, *args: Any, plan: dict[str, list[str]], found: Queue[list[str]], **kwargs: Any):
        self._texts = {
            "/rendered.html": ("text/html", _FRAME),
            "/rendered.js": ("text/javascript", Path(__file__).with_suffix(".js").read_text()),
            "/plan.json": ("application/json", json.dumps(plan)),
        }
        self._found = found
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        if self.path not in self._texts:
            super().do_GET()
            return
        kind, text = self._texts[self.path]
        self._answer(kind, text.encode())

    def do_POST(self) -> None:
        self._found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer("text/plain", b"")

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Print nothing for each file."""


def problems(site: Path, browser: str, pages: list[str], searches: list[str]) -> list[str]:
    """Return a line for each thing that is wrong on the pages, whose names are relative to the site."""
    found: Queue[list[str]] = Queue()
    plan = {"pages": pages, "searches": searches}
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, plan=plan, found=found, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # As root, in a container, it has no sandbox.
    options = [*OPTIONS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with tempfile.TemporaryDirectory(prefix="clcomm-browser-", ignore_cleanup_errors=True) as folder:
        address = f"http://127.0.0.1:{server.server_port}/rendered.html"
        process = subprocess.Popen(
            [browser, *options, f"--user-data-dir={folder}", address],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            return found.get(timeout=LIMIT_S)
        except Empty:
            return [f"{browser} did not get through the pages in {LIMIT_S:g} s"]
        finally:
            process.terminate()
            process.wait()
            server.shutdown()
            server.server_close()


def installed() -> str | None:
    """Return the browser's path; None without one."""
    return next(filter(None, (shutil.which(name) for name in BROWSERS)), None)


def main() -> int:
    site = Path(sys.argv[1])
    browser = installed()
    if browser is None:
        print(f"the drawn pages were not looked at: no Chromium is installed ({', '.join(BROWSERS)})")
        return 0
    pages = sys.argv[2:] or sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    found = problems(site, browser, pages, list(SEARCHES))
    print("\n".join(found) or f"{len(pages)} pages as drawn at two widths, light and dark: nothing is wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
