"""`{command-help} run` shows what `clcomm run --help` prints."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock


def help_of(command: str) -> str:
    """Return a sub-command's help, 100 characters wide; that of `clcomm` itself for ""."""
    from clcomm.cli import make_parser

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

    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
