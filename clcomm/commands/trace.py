"""`clcomm trace`: the timeline of a job that failed, from each rank's records; timelines in other formats."""

from __future__ import annotations

import argparse
from pathlib import Path

from clcomm.commands.command import Command
from clcomm.errors import ArgumentError
from clcomm.trace.merge import write_from_parts
from clcomm.trace.part_file import DEFAULT_LIMIT
from clcomm.trace.recorder import checked_limit

FORMATS = CHAKRA, OTF2 = "chakra", "otf2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the job's --trace file")
    parser.add_argument(
        "--limit", default=DEFAULT_LIMIT, metavar="SIZE", help="of the file before compression; default: %(default)s"
    )
    parser.add_argument("--to", choices=FORMATS, help="write a whole FILE in this format instead, into the folder -o")
    parser.add_argument("-o", "--output", metavar="DIR", help="of --to")


def run(options: argparse.Namespace) -> None:
    """Write the trace from the part files beside it, or in another format; ArgumentError if there are no parts."""
    if (options.to is None) != (options.output is None):
        raise ArgumentError("trace: expected --to FORMAT and -o DIR together")
    if options.to is not None:
        print(f"{_written_as(options.to, options.file, Path(options.output))}: written from {options.file}")
        return
    ranks = write_from_parts(options.file, checked_limit(options.limit, 1))
    print(f"{options.file}: written from the parts of rank {', '.join(map(str, ranks))}")


def _written_as(form: str, file: Path, folder: Path) -> str:
    """Write a trace in another format, and return the paths."""
    from clcomm.trace.timeline import read_timeline

    if form == CHAKRA:
        from clcomm.trace.chakra import write_chakra as write
    else:
        from clcomm.trace.otf2_archive import write_otf2 as write
    try:
        return ", ".join(map(str, write(read_timeline(file), folder)))
    except OSError as error:
        raise ArgumentError(f"-o: {folder}: {error.strerror}") from None


COMMAND = Command(
    "trace",
    "write the timeline of a job that was ended, or a timeline in another format",
    "A job that ends before it can write its --trace FILE leaves FILE.rank0.part and so on; this makes FILE of them. "
    "With --to a FILE is written as Chakra execution traces, or as an archive of the Open Trace Format 2.",
    add_arguments,
    run,
    (
        ("clcomm trace run.json.gz", "join the parts that a job left that was ended"),
        ("clcomm trace run.json.gz --to chakra -o traces", "for simulators that replay execution traces"),
    ),
)
