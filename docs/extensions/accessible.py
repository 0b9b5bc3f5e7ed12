"""What the theme's pages lack for screen readers and keyboards, put in when a page has been written.

Regions that scroll can be reached by the keyboard, captions of the navigation say which level of heading they are, the
two columns beside the text have names, a table's empty corner is no heading, and a signature is no list. Long names may
be broken after points and slashes, so that tables of them fit a narrow page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_REPLACEMENTS = (
    (r"<pre>", '<pre tabindex="0">'),
    (r'<(figure class="drawing"|div class="table-wrapper[^"]*")>', r'<\1 tabindex="0">'),
    (r'<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    (r'<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="All pages">'),
    (r'<aside class="toc-drawer([^"]*)">', r'<aside class="toc-drawer\1" aria-label="On this page">'),
    (r'<th class="([^"]*)"><p></p></th>', r'<td class="\1"></td>'),
)


#: A signature with a line for each argument is a list of definitions without terms.
_SIGNATURE = re.compile(r"<dl>\n((?:<dd>(?:(?!</?d[ldt]\b).)*</dd>\n)+)</dl>")
_NAME = re.compile(r'(?<=<span class="pre">)[^<]+(?=</span>)')


def mended(page: str) -> str:
    """Return a page's HTML with what it lacks; a mended page stays as it is."""
    page = _SIGNATURE.sub(lambda found: re.sub("<dd>(.*)</dd>", r'<span class="argument">\1</span>', found[1]), page)
    for pattern, replacement in _REPLACEMENTS:
        page = re.sub(pattern, replacement, page)
    return _NAME.sub(lambda name: re.sub(r"([./])(?=\w)", r"\1<wbr>", name[0]), page)


def setup(app: Any) -> dict[str, Any]:
    def on_finished(app: Any, exception: Exception | None) -> None:
        if exception is None and app.builder.format == "html":
            for path in Path(app.outdir).rglob("*.html"):
                path.write_text(mended(path.read_text()))

    app.connect("build-finished", on_finished)
    return {"parallel_read_safe": True}
