"""The texts of all pages for a search in a site that is opened as files, where browsers let no script read a page."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

#: Answers what the search asks for with a page's text in place of the page.
_PROGRAM = """if (location.protocol === "file:") {
  window.fetch = async (address) => {
    const main = Object.assign(document.createElement("div"), { textContent: TEXTS[address.replace("./", "")] ?? "" });
    main.setAttribute("role", "main");
    return { text: () => main.outerHTML };
  };
}
"""
FILE = "excerpts.js"
#: Drawings, programs, the links of headings to themselves, and the tags of everything else.
_MARKUP = re.compile(r'<(svg|style|script)\b.*?</\1>|<a class="headerlink".*?</a>|<[^>]*>', re.DOTALL)


def text_of(page: str) -> str:
    """Return the words of a page's main part."""
    main = page.partition('role="main"')[2].partition("</article>")[0].partition(">")[2]
    return " ".join(unescape(_MARKUP.sub("", main)).split())


def setup(app: Any) -> dict[str, Any]:
    def on_page(app: Any, pagename: str, *_: Any) -> None:
        if pagename == "search":
            app.add_js_file(FILE)

    def on_finished(app: Any, exception: Exception | None) -> None:
        if exception is None and app.builder.format == "html":
            out = Path(app.outdir)
            pages = sorted(out.rglob("*.html"))
            texts = {path.relative_to(out).as_posix(): text_of(path.read_text()) for path in pages}
            (out / "_static" / FILE).write_text(f"const TEXTS = {json.dumps(texts)};\n{_PROGRAM}")

    app.connect("html-page-context", on_page)
    app.connect("build-finished", on_finished)
    return {"parallel_read_safe": True}
