"""Merges all ranks' events into one file: sent to rank 0 in pieces, or read from the parts of a killed job."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from clcomm.base.errors import ArgumentError, ClcommError
from clcomm.base.storage.files import replacing, unwritable
from clcomm.comm.communicator import Communicator
from clcomm.insight.trace.events import RankEvents
from clcomm.insight.trace.part_file import ClockReading, TracePart, part_path

#: Where people look at traces.
VIEWER = "https://ui.perfetto.dev"
#: The label of a trace's collectives in the stats.
LABEL = "trace"
#: This level has most of the compression of gzip's highest one, at half of its cost.
_GZIP_LEVEL = 5
#: The exceptions that rows of a damaged part may raise.
_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


def write_together(comm: Communicator, part: Path, path: Path, limit_bytes: int) -> str:
    """Write the trace of all ranks' parts on rank 0; return the error, or "", on every rank. Collective.

    Args:
        limit_bytes: the size of the trace over all ranks, before compression.
    """
    events, problem = None, ""
    try:
        events = RankEvents(TracePart(part), limit_bytes // comm.size)
    except ArgumentError as error:
        problem = str(error)
    own = (problem, 0, {}) if events is None else (problem, events.begin_ns, events.came_last())
    problems, begins_ns, came_last = zip(*comm.all_gather_object(own, label=LABEL), strict=True)
    problem = next((each for each in problems if each), "")
    if problem or events is None:
        return problem
    ranks: list[dict[str, object]] = []
    gathered = _gathered(comm, events.pieces(min(begins_ns), _merged(came_last)), events, ranks)
    if comm.rank == 0:
        try:
            write_trace(path, gathered, lambda: _other_data(ranks))
        except OSError as error:
            problem = f"{path}: {error.strerror}"
    for _ in gathered:  # the other ranks, and rank 0 after a failure, take part to the end
        pass
    return str(comm.broadcast_object(problem, label=LABEL))


def write_from_parts(path: Path, limit_bytes: int) -> list[int]:
    """Write a trace from the parts beside it, and return their ranks.

    Raises ArgumentError if there are no parts or parts of several jobs, if one cannot be read, and if the trace cannot
    be written.
    """
    first = part_path(path, 0).name
    paths = list(path.parent.glob(first.replace(".rank0.", ".rank*.")))
    if not paths:
        raise ArgumentError(
            f"{path}: expected parts of a trace beside it, {first} and so on; found none; a job that ended by itself "
            f"has written its trace, which opens at {VIEWER}"
        )
    try:
        return _write_parts(path, sorted(map(TracePart, paths), key=lambda part: part.rank), limit_bytes)
    except ClcommError:
        raise
    except _DAMAGE:
        raise ArgumentError(f"{path}: expected parts as a job's ranks write them, found damaged ones") from None


def _write_parts(path: Path, parts: list[TracePart], limit_bytes: int) -> list[int]:
    if len({part.header["job"] for part in parts}) > 1:
        raise ArgumentError(
            f"{path}: expected parts of one job beside it, found those of several; remove the older ones"
        )
    ranks = [RankEvents(part, limit_bytes // len(parts)) for part in parts]
    origin_ns = min(each.begin_ns for each in ranks)
    came_last = _merged(each.came_last() for each in ranks)
    pieces = (piece for each in ranks for piece in each.pieces(origin_ns, came_last))
    try:
        write_trace(path, pieces, lambda: _other_data([_rank_data(each) for each in ranks]))
    except OSError as error:
        raise unwritable("trace", path, error) from None
    return [part.rank for part in parts]


def write_trace(path: Path, pieces: Iterable[str], other_data: Callable[[], dict[str, object]]) -> None:
    """Write pieces of events, then the result of `other_data()`; the file appears when it is complete.

    It is compressed if its name ends in .gz. Raises OSError.

    Args:
        pieces: comma-separated JSON events, as `RankEvents.pieces` yields them.
        other_data: called after the last piece; its result is the format's "otherData".
    """
    with ExitStack() as stack:
        file: BinaryIO | gzip.GzipFile = stack.enter_context(replacing(path))
        if path.suffix == ".gz":
            file = stack.enter_context(gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0))
        file.write(b'{"displayTimeUnit": "ns", "traceEvents": [')
        between = b"\n"
        for piece in pieces:
            file.write(between + piece.encode())
            between = b",\n"
        file.write(b'\n], "otherData": ' + json.dumps(other_data()).encode() + b"}\n")


def _merged(tables: Iterable[dict[int, int]]) -> dict[int, int]:
    return {sequence: ns for table in tables for sequence, ns in table.items()}


def _gathered(
    comm: Communicator, pieces: Iterator[str], events: RankEvents, ranks: list[dict[str, object]]
) -> Iterator[str]:
    """Yield all ranks' pieces on rank 0, none elsewhere; then fill `ranks` with each rank's data."""
    more = True
    while more:
        each_rank = comm.gather_object(next(pieces, None), label=LABEL) or []
        yield from (piece for piece in each_rank if piece is not None)
        more = comm.broadcast_object(any(piece is not None for piece in each_rank), label=LABEL)
    ranks += comm.gather_object(_rank_data(events), label=LABEL) or []


def _rank_data(events: RankEvents) -> dict[str, object]:
    header, rows = events.part.header, events.part.rows
    clocks = [ClockReading(*row)._asdict() for row in rows["clocks"]]
    named = {name: header[name] for name in ("rank", "host", "device", "device_uncertainty_ns")}
    return named | {"clocks": clocks, "slices_left_out": events.left_out, "notes": [text for _, text in rows["notes"]]}


def _other_data(ranks: list[dict[str, object]]) -> dict[str, object]:
    return {"producer": "clcomm", "clock": "CLOCK_MONOTONIC of rank 0, less the first event's time", "ranks": ranks}
