"""The page as a browser shows it: headless Chromium measures it at two widths, light and dark."""

from __future__ import annotations

import json
import re
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from clcomm.insight.report.formats import as_html
from clcomm.insight.report.recording import read_runs
from clcomm.insight.report.report import build
from tests.browser import CHROMIUM, QUIET, needs_chromium
from tests.report.families import KINDS, reported
from tests.report.runs import LAYOUT, document, written

PROBE = (Path(__file__).parent / "probe.js").read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A page with everything in it, with a long name and labels that want to be markup."""
    folder = tmp_path_factory.mktemp("page")
    whole = document(4, model="convnet<b>", dataset="a-data-set-with-a-name-of-many-letters")
    whole["ranks"][0]["stats"]["tallies"][0]["label"] = "<script>alert(1)</script>"
    path = folder / "report.html"
    path.write_text(as_html(build(read_runs(written(folder, [whole])))))
    return path


def browse(url: str, folder: Path, *options: str) -> tuple[str, str, list[str]]:
    """Open a page in a browser of its own; return its DOM, what the console said, and each address the page wanted."""
    log = folder / "net.json"
    done = subprocess.run(
        [CHROMIUM, *QUIET, "--enable-logging=stderr", f"--log-net-log={log}", f"--user-data-dir={folder / 'profile'}",
         "--virtual-time-budget=5000", *options, "--dump-dom", url],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    console = "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
    requests = re.findall(r'"initiator":"(.*?)".*?"url":"(.*?)"', log.read_text())
    return done.stdout, console, [url for origin, url in requests if origin != "not an origin"]  # the browser's own


def measured(page: Path, folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """Return what the probe finds in a page so many pixels wide."""
    # A window of Chromium's cannot be as narrow as a frame in it.
    frame = f'<iframe style="border:0;width:{width}px;height:4000px" srcdoc="{escape(page.read_text(), quote=True)}">'
    around = folder / "around.html"
    around.write_text(f'<body style="margin:0">{frame}</iframe><pre id="found"></pre><script>{PROBE}</script>')
    scheme = ["--force-dark-mode"] if dark else []
    dom, console, _ = browse(around.as_uri(), folder, f"--window-size={width + 100},1000", *scheme)
    assert console == ""
    match = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert match and match[1]
    found = json.loads(unescape(match[1]))
    assert (found["dark"], found["width"]) == (dark, width)
    assert found["pageWidth"] <= width and found["boxesInside"] and found["overflowing"] == []
    assert found["onEachOther"] == [] and found["onBars"] == []
    assert found["smallest"] >= 12 and found["smallestInCharts"] >= 10
    assert found["contrast"] >= 4.5  # WCAG 2.2, criterion 1.4.3
    return found


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_the_page_is_legible(page, tmp_path, width, dark):
    found = measured(page, tmp_path, width, dark)
    assert len(found["tables"]) >= 9 and found["rows"] >= 4 + 4 + len(LAYOUT)
    assert len(found["figures"]) == 6 and len(found["columns"]) > 10
    for what in ("figures", "columns", "bars"):
        assert all(w > 0 and h > 0 for w, h in found[what]) and found[what], what
    assert found["scrolling"] > 0 or width > 400  # wide tables move in boxes of their own


@needs_chromium
@pytest.mark.parametrize(("kind", "ranks", "width"), [("overlap", 12, 380), ("long", 4, 1000)])
def test_a_timeline_is_legible(tmp_path, kind, ranks, width):
    path = tmp_path / "report.html"
    (of_kind,) = (each for each in KINDS if each.name == kind)
    path.write_text(as_html(reported(of_kind, ranks, tmp_path)))
    found = measured(path, tmp_path, width, False)
    assert len(found["tracks"]) == ranks and len(found["stretches"]) > 10 * ranks
    left, right = found["tracks"][0]
    assert all(left - 1 <= begin < end for begin, end in found["stretches"])
    assert right - left > width / 2 and max(end for _, end in found["stretches"]) == pytest.approx(right, abs=2)


@needs_chromium
def test_the_page_asks_nobody_for_anything(page, tmp_path):
    dom, console, asked = browse(page.as_uri(), tmp_path)
    assert "<h1>" in dom and console == "" and asked == []


@needs_chromium
def test_the_browser_would_have_told(tmp_path):
    """The tests above can fail: a page that asks is seen to ask, and one that goes wrong is heard."""
    greedy = tmp_path / "greedy.html"
    greedy.write_text('<img src="http://127.0.0.1:9/x.png"><script>nothing.there()</script>')
    _, console, asked = browse(greedy.as_uri(), tmp_path)
    assert asked == ["http://127.0.0.1:9/x.png"] and "nothing is not defined" in console


def test_the_page_holds_nothing_that_is_elsewhere(page):
    text = page.read_text()
    assert not re.search(r"<(script|img|iframe|object|embed|form|video|audio)\b|@import|url\(", text)
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,"]
    assert "default-src 'none'" in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
