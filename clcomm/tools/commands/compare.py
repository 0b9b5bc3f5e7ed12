"""`clcomm compare`: changes between runs, and their significance, with clcomm/insight/report/."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from clcomm.base.console.table import TextColumn, TextTable
from clcomm.tools.commands import output
from clcomm.tools.commands.command import Command

if TYPE_CHECKING:
    from clcomm.insight.report.differences import Subject

#: Exit code where a run is slower than --fail-if-slower allows.
SLOWER = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILE",
        help="files of --report, of a run or a comparison; the first is the reference",
    )
    add(
        "--fail-if-slower", type=_share, metavar="PERCENT",
        help=f"exit with code {SLOWER} where a step takes longer than this, and by more than noise: 5%%",
    )  # fmt: skip
    output.add_arguments(parser)


def _share(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?%?", text):
        raise argparse.ArgumentTypeError(f"expected a percentage such as 5%, got {text!r}")
    return float(text.rstrip("%")) / 100


def run(options: argparse.Namespace) -> int:
    """Write the changes in each pair of runs; return 3 if one is slower than --fail-if-slower allows.

    Raises DataError, which names the file, if one can't be read or has no intervals for --fail-if-slower.
    """
    from clcomm.insight.report.comparison_report import as_json, comparison_report, warnings
    from clcomm.insight.report.differences import pairs  # here, to keep it out of the start of other commands

    form = output.form_of(options)
    found = pairs(options.files)
    for line in warnings(found):
        print(f"clcomm: {line}", file=sys.stderr)
    if form == "terminal" and not options.output:
        _print(found)
    elif form == "json":
        output.write_text(as_json(found), options.output)
    else:
        output.write_report(comparison_report(found), form, options.output)
    return SLOWER if options.fail_if_slower is not None and _slower(found, options.fail_if_slower) else 0


def _slower(found: list[tuple[Subject, Subject]], allowed: float) -> bool:
    """Print the runs that are slower by more than noise and the allowed share; return whether there are any."""
    from clcomm.insight.report.differences import step_change

    steps = [(before, after, step_change(before, after)) for before, after in found]
    slower = False
    for before, after, change in steps:
        if change.verdict == "more than noise" and change.relative is not None and change.relative > allowed:
            slower = True
            longer = f"a step takes {change.relative:.1%} longer than with {before.name}"
            print(f"clcomm: {after.name}: {longer}; allowed is {100 * allowed:g}%", file=sys.stderr)
    return slower


def _print(found: list[tuple[Subject, Subject]]) -> None:
    from rich.text import Text

    from clcomm.base.console.output import make_console
    from clcomm.insight.report.report import line

    console = make_console(highlight=False)
    shown: set[str] = set()
    for number, (before, after) in enumerate(found):
        if number:
            console.print()
        for subject in (before, after):
            if subject.name not in shown:
                shown.add(subject.name)
                console.print(Text(f"{subject.name}: {line(subject.run)}", "dim"), soft_wrap=False)
        console.print(_table(before, after))


def _table(before: Subject, after: Subject) -> TextTable:
    from clcomm.insight.report.differences import figures_changed, settings_changed

    settings, figures = settings_changed(before, after), figures_changed(before, after)
    styles = ["bold" if change.verdict == "more than noise" else "" for change in figures]
    return TextTable(
        [TextColumn("", right=False), *map(TextColumn, ("before", "after", "change")), TextColumn("", right=False)],
        [change.texts for change in (*settings, *figures)],
        title=f"{after.name}, against {before.name}",
        styles=[*[""] * len(settings), *styles],
    )


COMMAND = Command(
    "compare",
    "compare runs' reports: settings, speed, communication, bytes, accuracy",
    "Compare reports of runs with the first one's, or a comparison's variants with its reference. Times differ by more "
    "than noise where their 95% intervals don't touch; of runs that took turns, where their ratio's leaves out 1.",
    add_arguments,
    run,
    (
        ("clcomm compare before.json after.json", "what changed, and whether it is more than noise"),
        ("clcomm compare main.json branch.json --fail-if-slower 5%", "exit code 3 where a step takes longer: for CI"),
    ),
)
