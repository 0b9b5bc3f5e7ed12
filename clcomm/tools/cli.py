"""The `clcomm` command, also `python -m clcomm`. A sub-command is a file in commands/ and an entry in its listing.py.

Only the sub-command in use is imported, so that `clcomm --version` and `--help` load no slow modules.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from clcomm._version import __version__
from clcomm.base.console.option_types import OneLineParser
from clcomm.base.errors import ArgumentError
from clcomm.base.host.launcher import launched_rank, without_job
from clcomm.base.host.rank_process import ENDED_BY, handle_signals, rank_above, say_ended
from clcomm.tools.commands.listing import COMMANDS, DESCRIPTION, EPILOG, MOVED, Listed, add

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

#: The command that runs where others cannot.
DOCTOR = "doctor"


class Parser(OneLineParser):
    """A parser that prints once for all ranks."""

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        if not launched_rank():
            super()._print_message(message, file)


def make_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a command line; `options.run` is the function of the line's sub-command."""
    parser = Parser(prog="clcomm", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"clcomm {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    asked_for = next((word for word in arguments if not word.startswith("-")), None)
    for listed in COMMANDS:
        if listed.name != asked_for:
            commands.add_parser(listed.name, help=listed.summary)
            continue
        command = listed.load() if isinstance(listed, Listed) else listed
        add(commands, command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, the process's own by default; return the exit code."""
    given = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if given[0] in MOVED:
        raise ArgumentError(f"{given[0]}: works in clcomm's repository alone; there, python -m training.{given[0]}")
    options = make_parser(given).parse_args(given)
    if options.command == DOCTOR:  # no job, and NumPy may be missing
        return options.run(options) or 0
    from clcomm.comm.collectives.same_start import declared  # here, because help does not need it

    with declared(f"clcomm {options.command}", options):
        return options.run(options) or 0


def entry() -> NoReturn:
    """Run this process's command line and exit; errors are one line."""
    first, others = sys.argv[1:2], sys.argv[2:]
    is_known = first and first[0] in [each.name for each in COMMANDS]
    asks = first in ([], ["--version"], ["--help"], ["-h"]) or (is_known and others in (["--help"], ["-h"]))
    run_alone(main, bool(asks) or (first == [DOCTOR] and _lacks_numpy()))


def run_alone(main: Callable[[], int], at_once: bool = False) -> NoReturn:
    """Run a command and exit with its code; errors are one line. at_once: without slow imports, as for help."""
    if rank_above():  # the command is a job of its own
        for name in {*os.environ} - {*without_job(os.environ)}:
            del os.environ[name]
    if at_once:
        sys.exit(main())
    if launched_rank() is not None:
        from clcomm.comm.watch import endings

        endings.run(main)
    handle_signals(_end_at_once)
    atexit.register(handle_signals, signal.SIG_IGN)  # Python's own end would let one more signal decide the exit code
    from clcomm.comm.watch import endings

    def end_in_order(number: int, frame: object) -> None:
        if endings.is_reported():
            return
        handle_signals(lambda *_: None)  # one end is enough, and it removes what the command has made
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise endings.Exit(128 + number, ENDED_BY[signal.Signals(number)])

    handle_signals(end_in_order)
    endings.run(main)


def _end_at_once(number: int, frame: object) -> NoReturn:
    """End while modules are loaded, and nothing is started yet."""
    say_ended(number)
    os._exit(128 + number)


def _lacks_numpy() -> bool:
    """Return whether NumPy cannot be used, so that the doctor has to run without all that needs it."""
    from clcomm.tools.doctor import modules

    return bool(modules.numpy_failure())
