"""`clcomm algorithms`: the messages of textbook all-reduces, and a drawing of one of them."""

from __future__ import annotations

import argparse

from clcomm.base.console.option_types import number, whole_number
from clcomm.base.console.table import TextColumn, TextTable
from clcomm.base.schedules import ALGORITHMS, schedule_of
from clcomm.base.units import format_number, format_size, parse_size
from clcomm.comm.costs.forecast import traffic
from clcomm.comm.costs.model import Cost, terms
from clcomm.insight.drawing.svg import require_svg
from clcomm.insight.measure.plot import draw_schedule
from clcomm.tools.commands.command import Command

#: More ranks than a drawing has room for.
MOST_RANKS = 64
_COLUMNS = (
    TextColumn("algorithm", right=False), TextColumn("rounds"), TextColumn("messages"),
    TextColumn("bytes of all ranks"), TextColumn("busiest rank us"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=whole_number(1, MOST_RANKS), default=4, help="default: %(default)s")
    add("--size", default="1MiB", help="of the array; default: %(default)s")
    add("--draw", choices=ALGORITHMS, default="ring", metavar="NAME",
        help=f"draw one of {', '.join(ALGORITHMS)}; default: %(default)s")  # fmt: skip
    add("--plot", metavar="FILE.svg", help="also draw it into this file")
    add("--link-us", type=number(above=True), default=20.0, help="a message's latency; default: %(default)g")
    add("--link-gb-s", type=number(above=True), default=1.25, help="bandwidth in 10^9 bytes a second; default: 1.25")


def run(options: argparse.Namespace) -> None:
    """Print the formulas' figures and the drawing."""
    nbytes, ranks = parse_size(options.size, "--size"), options.ranks
    require_svg("--plot", options.plot)
    link = Cost(options.link_us * 1e-6, 1e-9 / options.link_gb_s)
    print(TextTable(_COLUMNS, [_row(name, ranks, nbytes, link) for name in ALGORITHMS],
                    title=f"all-reduce of {format_size(nbytes)} on {ranks} rank{'s' * (ranks > 1)}"))  # fmt: skip
    schedule = schedule_of(options.draw, ranks)
    print(f"\n{options.draw}: what each rank sends, block > receiver, + where it is added\n{schedule.drawing()}")
    if options.plot:
        draw_schedule(schedule, options.plot)


def _row(name: str, ranks: int, nbytes: int, link: Cost) -> list[str]:
    sent = traffic(name, ranks)
    seconds = terms("all_reduce", name, ranks).of(link).seconds(nbytes)
    return [name, str(sent.rounds), f"{sent.messages:,}", f"{sent.volume * nbytes:,}", format_number(seconds * 1e6, 1)]


COMMAND = Command(
    "algorithms",
    "show what all-reduce algorithms send: messages, bytes, a drawing",
    "Show rounds, messages, bytes and predicted time of the all-reduces that `algorithm=` selects, and who sends what "
    "when in one of them. `clcomm bench --operation all_reduce_ring` times them. docs/algorithms.md has more.",
    add_arguments,
    run,
    (("clcomm algorithms", "messages and bytes of each algorithm"),),
)
