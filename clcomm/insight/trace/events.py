"""A rank's part as JSON of the trace event format, in pieces of bounded size or while its job runs.

The format is that of "Trace Event Format" (the Chromium project): complete events with flows bound by `bind_id`,
instant events, counters, and metadata that name processes and threads. A rank is a process. chrome://tracing uses the
colours, which colour-blind readers can distinguish; Perfetto's UI chooses a colour for each name itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clcomm.base.units import format_size
from clcomm.insight.trace.part_file import ClockReading, Rows, TracePart, aligned
from clcomm.insight.trace.slices import CAME_LAST, LANES, THREADS, Slice, slices_of

#: Process ids are ranks plus this, because viewers take 0 for the idle process.
FIRST_PID = 1000
#: Events are sent to rank 0 in pieces of about this size.
PIECE_BYTES = 256 << 10
#: A bit that is set in the numbers of flows between ranks, to keep them apart from those within a rank.
_BETWEEN_RANKS = 1 << 62
#: How much longer an event can become, with its comma, when its times count from another origin.
_MOST_MORE_BYTES = 32
#: The part of a rank's share that is reserved for its names and notes.
_RESERVED_BYTES = 4096
#: A live file is updated after so many seconds, when a collective or a step ends.
LIVE_S = 1.0
#: By kind of slice, similar to the colours of a report's page.
COMPUTING, WAITING, MOVING, PACKING = "rail_load", "terrible", "vsync_highlight_color", "thread_state_runnable"
DATA, OPTIMIZER, AROUND = "thread_state_iowait", "detailed_memory_dump", "grey"
#: A backward apart from its forward, as a pipeline has them.
BACKWARD = "startup"
_OF_CATEGORY = {"kernel": COMPUTING, "communication": MOVING}
_OF_NAME = {
    "forward_backward": COMPUTING, "forward": COMPUTING, "backward": BACKWARD, "wait": WAITING, "pack": PACKING,
    "unpack": PACKING, "data": DATA, "optimizer": OPTIMIZER,
}  # fmt: skip


def thread_id(rank: int, thread: str, lane: int = 0) -> int:
    """Return a number for a rank's thread that is unique over all ranks."""
    return (FIRST_PID + rank) * 100 + THREADS.index(thread) * LANES + lane


def microseconds(ns: int) -> float:
    """Return ns in the format's unit, so that viewers that truncate it to whole ns get the same ns."""
    us = ns / 1000
    return us if int(us * 1000.0) == ns else math.nextafter(us, math.inf)


class RankEvents:
    """The events of a part, earliest first, up to `limit_bytes`.

    Attributes:
        left_out: the slices for which `pieces` had no room.
    """

    def __init__(self, part: TracePart, limit_bytes: int):
        self.part, self.limit_bytes = part, limit_bytes
        self._align = aligned(part.rows["clocks"])
        self._slices = slices_of(part, self._align)
        self.left_out = 0

    @property
    def begin_ns(self) -> int:
        """When the first slice begins, in ns of rank 0's clock."""
        return self._slices[0].begin_ns if self._slices else self._align(self.part.header["began_ns"])

    def came_last(self) -> dict[int, int]:
        """Return this rank's last arrivals, in ns of rank 0's clock, by the collective's sequence number.

        Only slices that fit into `pieces`: arrows from others would come from nowhere.
        """
        found, room = {}, self.limit_bytes - _RESERVED_BYTES
        for each in self._slices:
            # The most that it can take: with an arrow, and with numbers of any length.
            everyone = {each.sequence: each.begin_ns - 1}
            room -= sum(len(json.dumps(event)) + _MOST_MORE_BYTES for event in self._events(each, 0, everyone))
            if room < 0:
                break
            if each.name == CAME_LAST:
                found[each.sequence] = each.begin_ns
        return found

    def pieces(self, origin_ns: int, came_last: Mapping[int, int] = MappingProxyType({})) -> Iterator[str]:
        """Yield comma-separated lines of JSON, some hundred KiB at a time.

        Args:
            origin_ns: zero of the events' times, on rank 0's clock.
            came_last: the merged results of all ranks' `came_last()`, for the arrows to the ranks that waited.
        """
        piece: list[str] = []
        room, size = self.limit_bytes - _RESERVED_BYTES, 0
        for number, each in enumerate(self._slices):
            line = ",\n".join(map(json.dumps, self._events(each, origin_ns, came_last)))
            room -= len(line) + 2
            if room < 0:
                self.left_out = len(self._slices) - number
                break
            piece.append(line)
            size += len(line) + 2
            if size >= PIECE_BYTES:
                yield ",\n".join(piece)
                piece, size = [], 0
        yield ",\n".join([*piece, *map(json.dumps, [*self._notes(origin_ns), *self._names()])])

    def _events(self, each: Slice, origin_ns: int, came_last: Mapping[int, int]) -> Iterator[dict[str, object]]:
        """Yield a slice's event, and its counters' values at its end."""
        pid, rank = FIRST_PID + self.part.rank, self.part.rank
        event: dict[str, object] = {
            "ph": "X", "pid": pid, "tid": thread_id(rank, each.thread, each.lane),
            "ts": microseconds(each.begin_ns - origin_ns), "dur": microseconds(each.end_ns - each.begin_ns),
            "name": each.name, "cat": each.category, "cname": colour_of(each.name, each.category),
        }  # fmt: skip
        flow = each.flow_out or each.flow_in
        if flow:
            event["bind_id"] = hex(rank << 40 | flow)
            event["flow_out" if each.flow_out else "flow_in"] = True
        elif each.name == CAME_LAST or came_last.get(each.sequence, each.begin_ns) < each.begin_ns:
            event["bind_id"] = hex(_BETWEEN_RANKS | each.sequence)
            event["flow_out" if each.name == CAME_LAST else "flow_in"] = True
        if each.args:
            event["args"] = each.args
        yield event
        for name, value in each.counters:
            counter = {"ph": "C", "pid": pid, "tid": event["tid"], "ts": microseconds(each.end_ns - origin_ns)}
            yield counter | {"name": name, "args": {"of this rank": value}}

    def _notes(self, origin_ns: int) -> Iterator[dict[str, object]]:
        pid = FIRST_PID + self.part.rank
        notes = [(self._align(at_ns), text) for at_ns, text in self.part.rows["notes"]]
        if self.left_out:
            cut = self._slices[-self.left_out]
            share = format_size(self.limit_bytes)
            notes.append((cut.begin_ns, f"{self.left_out} slices left out: a rank's share of the limit is {share}"))
        for at_ns, text in notes:
            event = {"ph": "i", "s": "p", "pid": pid, "tid": thread_id(self.part.rank, THREADS[0])}
            yield event | {"ts": microseconds(max(0, at_ns - origin_ns)), "name": text, "cat": "note"}

    def _names(self) -> Iterator[dict[str, object]]:
        header, rank = self.part.header, self.part.rank
        pid = FIRST_PID + rank
        clock = self.part.rows["clocks"][-1]
        number = str(rank).zfill(len(str(header["world_size"] - 1)))  # some viewers sort by name
        name = f"{header['name']} " if header.get("name") else ""
        labels = f"clock {clock[1] / 1000:+.1f} us, give or take {clock[2] / 1000:.1f} us"
        for kind, args in (
            ("process_name", {"name": f"{name}rank {number}: {header['device'] or 'no device'} on {header['host']}"}),
            ("process_sort_index", {"sort_index": rank}),
            ("process_labels", {"labels": labels}),
        ):
            yield {"ph": "M", "pid": pid, "name": kind, "args": args}
        used = {(each.thread, each.lane) for each in self._slices}
        for thread, lane in sorted(used | {(thread, 0) for thread in THREADS}):
            tid = thread_id(rank, thread, lane)
            name = f"{thread} ({lane + 1})" if lane else thread
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


class LiveFile:
    """A rank's events as an array of JSON without its closing bracket, as viewers take it; each write is whole.

    Creating it and `append` may raise OSError.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], clock: ClockReading):
        self._header, self._clock = header, clock
        self._origin_ns = aligned([clock])(header["began_ns"])
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - open until the trace is closed
        self._between = "[\n"
        self.append({})

    def append(self, rows: Mapping[str, Rows]) -> None:
        """Write rows of KINDS; they share lanes and counters with those of this call alone."""
        part = TracePart.of(self._header, {"clocks": [self._clock], **rows})
        for piece in RankEvents(part, 1 << 62).pieces(self._origin_ns):
            self._file.write((self._between + piece).encode())
            self._between = ",\n"

    def close(self) -> None:
        self._file.close()


def colour_of(name: str, category: str) -> str:
    """Return the colour of a slice; a light one for those that enclose others, such as steps."""
    return _OF_NAME.get(name) or _OF_CATEGORY.get(category, AROUND)
