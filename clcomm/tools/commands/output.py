"""The formats of `clcomm report` and `clcomm compare`, and their output files."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from clcomm.base.console.terminal import plain_width
from clcomm.base.errors import ArgumentError
from clcomm.base.storage.files import write_whole
from clcomm.insight.drawing.svg import draw

if TYPE_CHECKING:
    from clcomm.insight.report import Report

FORMATS = ("terminal", "markdown", "json", "csv", "html", "svg")
#: Formats by the ending of the output file's name.
_ENDINGS = {
    ".md": "markdown", ".json": "json", ".csv": "csv", ".html": "html", ".htm": "html", ".svg": "svg",
    ".txt": "terminal", "": "terminal",
}  # fmt: skip
_ALIASES = {"md": "markdown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format", type=lambda text: _ALIASES.get(text, text), choices=FORMATS,
        help="default: by the ending of -o's name, else terminal",
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="OUT", help="write there instead of printing")


def form_of(options: argparse.Namespace) -> str:
    """Return the chosen format; raises ArgumentError if it can't be written."""
    form = options.format or _form_of_name(options.output or "")
    if form == "svg" and not options.output:
        raise ArgumentError("--format svg: needs -o OUT to say where")
    return form


def _form_of_name(output: str) -> str:
    """Return the format of a file name's ending; raises ArgumentError for an unknown one."""
    form = _ENDINGS.get(Path(output).suffix.lower())
    if form is None:
        known = ", ".join(ending for ending in _ENDINGS if ending)
        raise ArgumentError(f"-o: expected a name that ends in one of {known}, got {output!r}; or choose with --format")
    return form


def write_report(report: Report, form: str, output: str | None) -> None:
    """Write a report to the file `output` in the format `form`; without a file, print it."""
    if form == "terminal":
        _write_for_terminal(report, output)
    elif form == "svg":
        assert output is not None  # form_of requires -o for this format
        if not report.charts:
            raise ArgumentError("--format svg: this run has nothing to draw")
        title = "\n".join(text for text in (report.title, report.subtitle) if text)
        draw([chart.scene() for chart in report.charts], output, "-o", title)
    else:
        from clcomm.insight.report.formats import as_csv, as_html, as_json, as_markdown

        writers = {"markdown": as_markdown, "json": as_json, "csv": as_csv, "html": as_html}
        write_text(writers[form](report), output)


def _write_for_terminal(report: Report, output: str | None) -> None:
    from rich.console import Console

    from clcomm.base.console.output import make_console
    from clcomm.insight.report.report import show

    if output:
        text = io.StringIO()
        show(report, Console(highlight=False, width=plain_width(), file=text))
        write_text(text.getvalue(), output)
    else:
        show(report, make_console(highlight=False, soft_wrap=False))


def write_text(text: str, output: str | None) -> None:
    if output:
        write_whole(output, text, "-o")
    else:
        sys.stdout.write(text)
