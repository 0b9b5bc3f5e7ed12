"""A rank's records on their way into the trace: a file beside it, so that a job that is killed leaves what it saw."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from clcomm.errors import ArgumentError
from clcomm.files import open_alone, open_regular

FORMAT = "clcomm trace part 1"
#: What a part is made of; a row is a tuple of plain values.
KINDS = ("kernels", "phases", "collectives", "clocks", "notes")
Rows = Sequence[Sequence[Any]]


def part_path(trace: Path, rank: int) -> Path:
    """Return where a rank keeps its part until the trace is written."""
    return trace.with_name(f"{trace.name}.rank{rank}.part")


class PartWriter:
    """A part that grows by a line of JSON at a time; `header` tells whose it is. Raises OSError, as `append` does.

    A line that could not be written whole is taken back.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]):
        self.path = path
        self._file = open_alone(path, "wb", buffering=0)
        self._whole_bytes = 0
        try:
            self._write({"format": FORMAT, **header})
        except OSError:
            self.remove()
            raise

    def append(self, **rows: Rows) -> None:
        """Keep rows of one or more KINDS."""
        self._write(rows)

    def _write(self, chunk: Mapping[str, Any]) -> None:
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
        """Close it and take it away."""
        self.close()
        self.path.unlink(missing_ok=True)


def _plain(value: object) -> int | float | str:
    """Return what JSON knows for what it does not know, NumPy's numbers above all."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else str(value)


class Part:
    """What a rank recorded: `header`, and a list of rows of each of the KINDS.

    A part whose end is missing, as a killed process leaves it, is read as far as it goes. Raises ArgumentError for a
    file that cannot be read or is no part.
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

    @property
    def rank(self) -> int:
        """Whose it is."""
        return self.header["rank"]


def _chunks(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
            for line in file:
                chunk = json.loads(line)
                if not isinstance(chunk, dict):
                    return
                yield chunk
    except (ValueError, RecursionError):  # a line that breaks off, or that no rank wrote
        return
    except OSError as error:
        raise ArgumentError(f"{path}: expected a part of a trace, cannot read it ({error.strerror})") from None
