"""`clcomm report`: what a run's figures say, for people and for programs; clcomm/report/ does it."""

from __future__ import annotations

import argparse
import importlib.util
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from clcomm.commands.command import Command
from clcomm.errors import ArgumentError
from clcomm.files import write_whole
from clcomm.terminal import plain_width

if TYPE_CHECKING:
    from clcomm.report import Report

FORMATS = ("terminal", "markdown", "json", "csv", "html", "png")
_ENDINGS = {
    ".md": "markdown", ".json": "json", ".csv": "csv", ".html": "html", ".htm": "html", ".png": "png",
    ".txt": "terminal", "": "terminal",
}  # fmt: skip
_ALSO = {"md": "markdown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="what --report wrote: a run's file, or those of its ranks")
    add(
        "--format", type=lambda text: _ALSO.get(text, text), choices=FORMATS,
        help="default: what -o's ending says, else terminal",
    )  # fmt: skip
    add("-o", "--output", metavar="OUT", help="write there instead of printing")


def run(options: argparse.Namespace) -> int:
    """Write the report; return 1 when a file had to be left out. Raises DataError when none could be read."""
    from clcomm.report import build, read_runs  # here, because the other commands do without

    form = options.format or _form_of(options.output or "")
    _check(form, options.output)
    found = read_runs(options.files)
    for problem in found.problems:
        print(f"clcomm: left out {problem}", file=sys.stderr)
    report = build(found)
    if form == "terminal":
        _print(report, options.output)
    elif form == "png":
        from clcomm.report.png import draw

        draw(report, options.output)
    else:
        _write(_text_in(form, report), options.output)
    return 1 if found.problems else 0


def _form_of(output: str) -> str:
    """Return the form that a name's ending asks for."""
    form = _ENDINGS.get(Path(output).suffix.lower())
    if form is None:
        known = ", ".join(ending for ending in _ENDINGS if ending)
        raise ArgumentError(f"-o: expected a name that ends in one of {known}, got {output!r}; or choose with --format")
    return form


def _check(form: str, output: str | None) -> None:
    if form != "png":
        return
    if not output:
        raise ArgumentError("--format png: needs -o OUT to say where")
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--format png: needs matplotlib, which is not installed; pip install 'clcomm[plot]'")


def _text_in(form: str, report: Report) -> str:
    from clcomm.report import html, plain

    writers = {"markdown": plain.as_markdown, "json": plain.as_json, "csv": plain.as_csv, "html": html.as_html}
    return writers[form](report)


def _print(report: Report, output: str | None) -> None:
    from rich.console import Console

    from clcomm.console import make_console
    from clcomm.report.terminal import show

    if output:
        text = io.StringIO()
        show(report, Console(highlight=False, width=plain_width(), file=text))
        _write(text.getvalue(), output)
    else:
        show(report, make_console(highlight=False, soft_wrap=False))


def _write(text: str, output: str | None) -> None:
    if output:
        write_whole(output, text, "-o")
    else:
        sys.stdout.write(text)


COMMAND = Command(
    "report",
    "show what a run's figures say: tables, charts, a page",
    "Show what a run's --report says: where the time went, which bucket, which rank. Files of several ranks of one run "
    "are put together, whatever their order. docs/reading-a-report.md reads one line by line.",
    add_arguments,
    run,
)
