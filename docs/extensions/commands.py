"""On the site `<!-- help of run -->` to `<!-- end -->`, which docs/listings.py writes, is `clcomm run --help`.

The directive `{command-help} run` is the same.
"""

from __future__ import annotations

import os
import re
from typing import Any
from unittest import mock

_PART = re.compile(r"<!-- help of ?([\w-]*) -->.*?<!-- end -->", re.DOTALL)


def help_of(command: str) -> str:
    """Return a sub-command's help, 100 characters wide; that of `clcomm` itself for ""."""
    from clcomm.tools.cli import make_parser

    with mock.patch.dict(os.environ, {"COLUMNS": "100"}):
        parser = make_parser([command] if command else [])
        if not command:
            return parser.format_help()
        (commands,) = (action for action in parser._actions if hasattr(action, "add_parser"))
        return commands.choices[command].format_help()  # type: ignore[index]


def setup(app: Any) -> dict[str, Any]:
    from docutils import nodes
    from docutils.parsers.rst import Directive

    class CommandHelp(Directive):
        optional_arguments = 1

        def run(self) -> list[nodes.Node]:
            text = help_of(self.arguments[0] if self.arguments else "")
            return [nodes.literal_block(text, text, language="text")]

    def on_source_read(app: Any, docname: str, source: list[str]) -> None:
        source[0] = _PART.sub(lambda found: f"```{{command-help}} {found[1]}\n```", source[0])

    app.connect("source-read", on_source_read)
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
