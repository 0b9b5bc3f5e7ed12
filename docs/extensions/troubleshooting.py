"""`{messages}` lists the messages that some files raise; all lists together have every message once.

A file belongs to the list that names it, or the innermost of its folders.

```{messages}
:from: clcomm/comm/collectives clcomm/comm/communicator.py
```
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from docs.extensions.messages import ANY, Message, messages


def lists(page: str) -> list[str]:
    """Return the `:from:` of each list on a page."""
    return re.findall(r"^```\{messages\}\n:from: (.+)\n```$", page, re.MULTILINE)


def place_of(file: str, places: Iterable[str]) -> str:
    """Return the place that a file belongs to, the longest one if it lies in several; "" if it is in none."""
    return max((place for place in places if f"{file}/".startswith(place.rstrip("/") + "/")), key=len, default="")


def chosen(files: str, page: str) -> list[Message]:
    """Return the messages of a list's files and folders, those of a longer place in another list left out."""
    every = [place for each in lists(page) for place in each.split()]
    return [message for message in messages() if place_of(message.file, every) in files.split()]


def uncovered(page: str) -> list[str]:
    """Return what is wrong: messages that are in no list, places without any message, places in two lists."""
    every = [place for each in lists(page) for place in each.split()]
    found = {message: place_of(message.file, every) for message in messages()}
    wrong = [f"{message.file}: in no list: {message.text}" for message, place in found.items() if not place]
    wrong += [f"{place}: no messages" for place in every if place not in found.values()]
    return wrong + [f"{place}: in several lists" for place in sorted(set(every)) if every.count(place) > 1]


def as_html(found: list[Message]) -> str:
    """Return a folded list of messages by what they begin with."""
    ordered = sorted(found, key=lambda each: (each.subject.lower(), each.text))
    items = []
    for _, group in groupby(ordered, key=lambda each: each.text):
        message = next(group)
        text = escape(message.text).replace(ANY, "<var>…</var>")
        error = f" <small>{message.error}</small>" if message.error else ""
        items.append(f"<li><code>{text}</code>{error}</li>")
    count = f"{len(items)} messages" if len(items) > 1 else "One message"
    return f'<details class="messages"><summary>{count}</summary><ul>{"".join(items)}</ul></details>'


def setup(app: Any) -> dict[str, Any]:
    from docutils import nodes
    from docutils.parsers.rst import Directive, directives
    from sphinx.util import logging

    class Messages(Directive):
        option_spec = {"from": directives.unchanged_required}  # noqa: RUF012 - docutils' own form

        def run(self) -> list[nodes.Node]:
            page = Path(self.state.document.settings.env.srcdir, "troubleshooting.md").read_text()
            return [nodes.raw("", as_html(chosen(self.options["from"], page)), format="html")]

    def on_consistency(app: Any, env: Any) -> None:
        for problem in uncovered((app.srcdir / "troubleshooting.md").read_text()):
            logging.getLogger(__name__).warning("troubleshooting: %s", problem)

    app.add_directive("messages", Messages)
    app.connect("env-check-consistency", on_consistency)
    return {"parallel_read_safe": True}
