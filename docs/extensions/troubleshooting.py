"""`{messages}` lists the messages that some files raise; all lists together have every message once.

```{messages}
:from: clcomm/collectives clcomm/communicator.py
```
"""

from __future__ import annotations

import re
from html import escape
from itertools import groupby
from typing import Any

from docs.extensions.messages import ANY, Message, messages


def chosen(files: str, known: list[Message]) -> list[Message]:
    """Return the messages of a list's files and folders."""
    return [message for message in known if is_from(message.file, files.split())]


def is_from(file: str, places: list[str]) -> bool:
    return any(file == place or file.startswith(place.rstrip("/") + "/") for place in places)


def lists(page: str) -> list[str]:
    """Return the `:from:` of each list on a page."""
    return re.findall(r"^```\{messages\}\n:from: (.+)\n```$", page, re.MULTILINE)


def uncovered(page: str) -> list[str]:
    """Return what is wrong: messages that are in no list or in several, and places without any message."""
    known, places = messages(), [text.split() for text in lists(page)]
    wrong = []
    for message in known:
        times = sum(is_from(message.file, each) for each in places)
        if times != 1:
            wrong.append(f"{message.file}: in {times} lists: {message.text}")
    every = [place for each in places for place in each]
    return wrong + [f"{place}: no messages" for place in every if not chosen(place, known)]


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
            return [nodes.raw("", as_html(chosen(self.options["from"], messages())), format="html")]

    def on_consistency(app: Any, env: Any) -> None:
        for problem in uncovered((app.srcdir / "troubleshooting.md").read_text()):
            logging.getLogger(__name__).warning("troubleshooting: %s", problem)

    app.add_directive("messages", Messages)
    app.connect("env-check-consistency", on_consistency)
    return {"parallel_read_safe": True}
