"""Reads a written trace back: each rank's slices by thread, for files in other programs' formats."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from clcomm.errors import DataError
from clcomm.storage.field_checks import refuse_constant
from clcomm.storage.files import read_regular
from clcomm.trace.events import FIRST_PID

_MOST_BYTES, _MOST_NS = 1 << 30, 1 << 62


class Span(NamedTuple):
    """A slice of a rank's thread, in ns since the trace's first event; `thread` is its row's number in the file."""

    begin_ns: int
    end_ns: int
    thread: int
    name: str
    category: str
    args: dict[str, Any]


class Timeline(NamedTuple):
    """A rank's slices, earliest first and outer ones before those in them, and the names of its threads by number."""

    rank: int
    threads: dict[int, str]
    spans: list[Span]


def read_timeline(path: Path) -> list[Timeline]:
    """Return the ranks of a file of --trace, in order; DataError for a file that is none."""
    try:
        text = read_regular(str(path), _MOST_BYTES)
        if text[:2] == b"\x1f\x8b":
            text = _unpacked(text)
        events = json.loads(text, parse_constant=refuse_constant)["traceEvents"]
        found: dict[int, Timeline] = {}
        for event in events:
            rank = int(event["pid"]) - FIRST_PID
            one = found.setdefault(rank, Timeline(rank, {}, []))
            if event["ph"] == "M" and event["name"] == "thread_name":
                one.threads[int(event["tid"])] = str(event["args"]["name"])
            elif event["ph"] == "X":
                one.spans.append(_span(event))
        if not found or min(found) < 0:
            raise ValueError("it has no ranks")
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        missing = f"none with {error}" if isinstance(error, LookupError) else error
        reason = " ".join(str(getattr(error, "strerror", None) or missing).split())[:200]
        raise DataError(f"{path}: expected a file of --trace, which is JSON, found {reason or 'another'}") from None
    for one in found.values():
        one.spans.sort(key=lambda span: (span.begin_ns, -span.end_ns))
    return [found[rank] for rank in sorted(found)]


def _unpacked(packed: bytes) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES} bytes when unpacked")
    return text


def _span(event: dict[str, Any]) -> Span:
    begin_ns, length_ns = round(event["ts"] * 1000), round(event["dur"] * 1000)
    if not 0 <= begin_ns < _MOST_NS or not 0 <= length_ns < _MOST_NS:
        raise ValueError(f"a slice at {event['ts']}")
    args = event.get("args", {})
    return Span(begin_ns, begin_ns + length_ns, int(event["tid"]), str(event["name"]), str(event["cat"]), dict(args))


def collectives(one: Timeline) -> Iterator[Span]:
    """Yield a rank's collectives, without the parts that they have in the trace."""
    return (span for span in one.spans if span.category == "communication" and "sequence" in span.args)
