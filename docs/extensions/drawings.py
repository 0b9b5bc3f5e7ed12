"""Drawings (docs/drawings/*.svg) become part of their page, so that their text has the page's colours and font."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any


def inline(svg: str, description: str) -> str:
    """Return a drawing as HTML: one image with a description, without the colours that it has as a file."""
    body = re.sub(r"<\?xml.*?\?>|<style>.*?</style>", "", svg, flags=re.DOTALL).strip()
    body = body.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1)
    return f'<figure class="drawing">{body}</figure>'


def setup(app: Any) -> dict[str, Any]:
    from docutils import nodes

    def on_resolved(app: Any, doctree: Any, docname: str) -> None:
        if app.builder.format != "html":
            return
        for image in list(doctree.findall(nodes.image)):
            path = Path(app.srcdir) / image["uri"]
            if path.suffix == ".svg" and path.parent.name == "drawings" and path.exists():
                raw = nodes.raw("", inline(path.read_text(), image.get("alt", "")), format="html")
                paragraph = image.parent
                alone = isinstance(paragraph, nodes.paragraph) and len(paragraph.children) == 1
                (paragraph if alone else image).replace_self(raw)

    app.connect("doctree-resolved", on_resolved)
    return {"parallel_read_safe": True}
