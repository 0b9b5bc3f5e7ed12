"""`clcomm trace`: the timeline of a job that was ended, from each rank's records."""

from __future__ import annotations

import argparse
from pathlib import Path

from clcomm.insight.trace.merge import VIEWER, write_from_parts
from clcomm.insight.trace.part_file import DEFAULT_LIMIT
from clcomm.insight.trace.recorder import checked_limit
from clcomm.tools.commands.command import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the job's --trace file")
    parser.add_argument(
        "--limit", default=DEFAULT_LIMIT, metavar="SIZE", help="of the file before compression; default: %(default)s"
    )


def run(options: argparse.Namespace) -> None:
    """Write the trace from the part files beside it; ArgumentError if there are no parts."""
    ranks = write_from_parts(options.file, checked_limit(options.limit, 1))
    print(f"{options.file}: written from the parts of rank {', '.join(map(str, ranks))}; open it at {VIEWER}")


COMMAND = Command(
    "trace",
    "write the timeline of a job that was ended",
    "A job that ends before it can write its --trace FILE leaves FILE.rank0.part and so on; this makes FILE of them. "
    f"Perfetto shows it: {VIEWER}.",
    add_arguments,
    run,
    (("clcomm trace run.json.gz", "join the parts that a job left that was ended"),),
)
