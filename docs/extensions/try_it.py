"""`{try} buckets` is an interactive part of a page: sliders, and what `clcomm tune --from` predicts for them.

docs/static/predict.js makes it; the file that it begins with, docs/static/bench.json, is in the page, so that a page
opened from a disk works too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

STATIC = Path(__file__).resolve().parent.parent / "static"


def as_html(topic: str, script: str) -> str:
    """Return the part for buckets, overlap, zero or pipeline; `script`: the address of predict.js from the page."""
    data = (STATIC / "bench.json").read_text().replace("<", "\\u003c")
    return (
        f'<div class="try" data-try="{topic}"><noscript>This part of the page needs JavaScript.</noscript>'
        f'<script type="application/json">{data}</script></div>\n<script src="{script}" defer></script>'
    )


def setup(app: Any) -> dict[str, Any]:
    from docutils import nodes
    from docutils.parsers.rst import Directive

    class Try(Directive):
        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            return [nodes.raw("", as_html(self.arguments[0], "../_static/predict.js"), format="html")]

    app.add_directive("try", Try)
    return {"parallel_read_safe": True}
