"""`clcomm man`: the manual page, written from the parsers in roff's man macros (groff_man(7))."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

from clcomm._version import __version__
from clcomm.commands.command import Command
from clcomm.console.exit_codes import EXIT_CODES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", action="store_true", help="print the page's source, as to a pipe")


def run(options: argparse.Namespace) -> int:
    """Show the page with man(1) on a terminal; print its source elsewhere, and where there is no man(1)."""
    from clcomm.commands.listing import COMMANDS, Listed, whole_parser

    commands = [each.load() if isinstance(each, Listed) else each for each in COMMANDS]
    text = page(whole_parser(), commands)
    viewer = shutil.which("man")
    if options.source or viewer is None or not sys.stdout.isatty():
        sys.stdout.write(text)
        return 0
    return subprocess.run([viewer, "-l", "-"], input=text, text=True, check=False).returncode


def page(parser: argparse.ArgumentParser, commands: list[Command]) -> str:
    """Return the page's source: every command with its options and examples, the exit codes."""
    lines = [f'.TH CLCOMM 1 "" "clcomm {__version__}"', ".SH NAME", f"clcomm \\- {_plain(parser.description or '')}"]
    lines += [".SH SYNOPSIS", ".B clcomm", r"\fIcommand\fR [\fIoptions\fR]", ".SH COMMANDS"]
    parsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    for command in commands:
        lines += [f".SS clcomm {_plain(command.name)}", _plain(command.description)]
        lines += _options(parsers[command.name])
        lines += [".PP", "Examples:"] if command.examples else []
        for example, what in command.examples:
            lines += [".TP", f".B {_plain(example)}", _plain(what)]
    lines.append(".SH EXIT STATUS")
    for code, meaning in EXIT_CODES.items():
        lines += [".TP", f".B {code}", _plain(meaning)]
    return "\n".join(lines) + "\n"


def _options(parser: argparse.ArgumentParser) -> list[str]:
    lines = []
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or action.dest == "help":
            continue
        lines += [".TP", f".B {_plain(formatter._format_action_invocation(action))}"]
        lines.append(_plain(formatter._expand_help(action) if action.help else "") or r"\&")
    return lines


def _plain(text: str) -> str:
    """Escape roff's special characters: backslashes, and a dot or quote at a line's begin."""
    escaped = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


COMMAND = Command(
    "man",
    "show the manual page, or print its source",
    "Show the manual page of all commands, their options and examples, and the exit codes.",
    add_arguments,
    run,
    (
        ("clcomm man", "read it"),
        ("clcomm man --source | groff -man -Tpdf > manual.pdf", "print it"),
    ),
)
