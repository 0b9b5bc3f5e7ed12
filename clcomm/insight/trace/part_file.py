"""A rank's part of a trace: a file of its records beside the trace, which survives if the job is killed."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

from clcomm.base.errors import ArgumentError
from clcomm.base.storage.files import open_locked, open_regular
from clcomm.comm.communicator import Communicator
from clcomm.comm.transport.hosts import ClockOffset, measure_offset

FORMAT = "clcomm trace part 1"
#: The most bytes of the file that all parts become, unless a job says otherwise.
DEFAULT_LIMIT = "64MiB"
#: The kinds of rows in a part; a row is a tuple of plain values.
KINDS = ("kernels", "phases", "collectives", "clocks", "notes")
Rows = Sequence[Sequence[object]]


def part_path(trace: Path, rank: int) -> Path:
    """Return the path of a rank's part, which exists until the trace is written."""
    return trace.with_name(f"{trace.name}.rank{rank}.part")


class PartWriter:
    """Writes a part, a line of JSON at a time; the first is `header`.

    A line that cannot be written whole is removed again. Creating the writer and `append` may raise OSError.
    """

    def __init__(self, path: Path, header: Mapping[str, object]):
        self.path = path
        self._file = open_locked(path, "wb", buffering=0)
        self._whole_bytes = 0
        try:
            self._write({"format": FORMAT, **header})
        except OSError:
            self.remove()
            raise

    def append(self, **rows: Rows) -> None:
        self._write(rows)

    def _write(self, chunk: Mapping[str, object]) -> None:
        line = (json.dumps(chunk, default=_plain) + "\n").encode()
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(self._whole_bytes)
            self._file.seek(self._whole_bytes)
            raise
        self._whole_bytes += len(line)

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)


def _plain(value: object) -> int | float | str:
    """Return a JSON value in place of an unsupported one, such as a NumPy number."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else str(value)


class TracePart:
    """A rank's records: `header`, and `rows` by kind, one of KINDS.

    A part that a killed process left, without its end, is read up to the first incomplete line. Raises ArgumentError
    for a file that cannot be read or is no part.
    """

    def __init__(self, path: Path):
        chunks = _chunks(path)
        self.header: dict[str, Any] = next(chunks, {})
        self.rows: dict[str, list[Sequence[Any]]] = {kind: [] for kind in KINDS}
        for chunk in chunks:
            for kind in KINDS:
                rows = chunk.get(kind, [])
                self.rows[kind] += rows if isinstance(rows, list) else []
        is_ours = self.header.get("format") == FORMAT and type(self.header.get("rank")) is int and "job" in self.header
        if not is_ours or not self.rows["clocks"]:
            raise ArgumentError(f"{path}: expected a part of a trace, found something else")

    @classmethod
    def of(cls, header: Mapping[str, object], rows: Mapping[str, Rows]) -> TracePart:
        part = cls.__new__(cls)
        part.header, part.rows = dict(header), {kind: list(rows.get(kind, ())) for kind in KINDS}
        return part

    @property
    def rank(self) -> int:
        return int(self.header["rank"])


def _chunks(path: Path) -> Iterator[dict[str, object]]:
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
            for line in file:
                chunk = json.loads(line)
                if not isinstance(chunk, dict):
                    return
                yield chunk
    except (ValueError, RecursionError):  # a line that is cut off or damaged
        return
    except OSError as error:
        raise ArgumentError(f"{path}: expected a part of a trace, cannot read it ({error.strerror})") from None


# --- Measurement of each rank's clock against rank 0's, at the start and at the end of a trace. ---


class ClockReading(NamedTuple):
    """The offset of this rank's clock, rank 0's time minus its own, as used and as measured.

    Ranks on rank 0's host read the same clock, CLOCK_MONOTONIC: their offset is 0 unless the measurement proves that
    wrong. Ranks on another host use the most certain measurement of that host.

    Attributes:
        at_ns: this rank's perf_counter_ns() at the measurement.
        offset_ns: the offset as used.
        uncertainty_ns: its largest error.
        measured_ns: the offset as this rank measured it.
        measured_uncertainty_ns: the largest error of that measurement.
    """

    at_ns: int
    offset_ns: int
    uncertainty_ns: int
    measured_ns: int
    measured_uncertainty_ns: int


def read_clock(comm: Communicator) -> ClockReading:
    own = measure_offset(comm.comm)
    measured: list[tuple[int, ClockOffset]] = comm.all_gather_object((comm.host, own), label="trace")
    offset = agreed_offset(measured, comm.rank)
    return ClockReading(time.perf_counter_ns(), *offset, *own)


def agreed_offset(measured: Sequence[tuple[int, ClockOffset]], rank: int) -> ClockOffset:
    """Return the offset for a rank; `measured` has the (host, measurement) of every rank, by rank."""
    host, own = measured[rank]
    if host == measured[0][0]:
        return own if abs(own.offset_ns) > own.uncertainty_ns else ClockOffset()
    return min((each for where, each in measured if where == host), key=lambda each: each.uncertainty_ns)


def aligned(readings: Sequence[Sequence[int]]) -> Callable[[int], int]:
    """Return a function from a rank's perf_counter_ns() to rank 0's; drift is taken as linear between the readings.

    `readings` are ClockReadings, or rows of their values.
    """
    first, last = ClockReading(*readings[0]), ClockReading(*readings[-1])
    span, drift = last.at_ns - first.at_ns, last.offset_ns - first.offset_ns
    if not drift or not span:
        return lambda ns: ns + first.offset_ns
    return lambda ns: ns + first.offset_ns + (ns - first.at_ns) * drift // span
