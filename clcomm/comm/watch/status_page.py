"""The status of a host's ranks, on a page in shared memory: each rank's watchdog writes its own line.

A line is at most a second old unless its process is stopped or dead, which /proc shows. Processes of the same user find
the status page of a whole job under /proc/PID/fd of its ranks, whose mappings keep it open (`worlds.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from time import perf_counter_ns, sleep
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from clcomm.base.host.host_processes import stat_fields
from clcomm.base.host.rank_process import start_time
from clcomm.comm.transport.common_memory import common_memory

if TYPE_CHECKING:
    from clcomm.comm.transport.mpi_runtime import Intracomm

#: A line: words (int64), then text. Line 0 is common to all ranks: the time of the last stall report, who ends the job
#: and since when, the dump folder.
_LINE_BYTES, _TEXT_START = 2048, 128
_VERSION, _PID, _STARTED, _BEAT_NS, _KEY, _BEGAN_NS, _DUMPED, _TEXT_BYTES = range(8)
_REPORTED_NS, _FORMAT, _RANKS, _DESCRIPTION_BYTES, _ENDED_BY, _ENDED_NS = range(1, 7)  # in line 0
#: The status page's name in /proc, the format of its lines, and the room for the job's description: for any job, and
#: for each of its ranks.
NAME, FORMAT, _DESCRIPTION_ROOM, _DESCRIPTION_ROOM_OF_RANK = "clcomm-status", 1, 8192, 64
#: How long a rank whose claim to end the job was granted has for that, and how long a claim takes.
_GRANTED_S, _CLAIM_S = 2.0, 0.02
#: Index of a process's start time in `stat_fields`.
_START_FIELD = 19


class RankStatus(NamedTuple):
    """A rank's line.

    Attributes:
        beat_ns: when the line was written (perf_counter_ns).
        key: identifies the collective; 0: the rank is in none of this Communicator.
        text: description of the collective, or of another Communicator's in which the rank is.
        began_ns: begin of the collective (perf_counter_ns); for a rank that has left the program, its number of
            collectives.
        dumped: whether the rank has written its last operations to the dump folder.
        state: "running", "stopped", "dead", or `stall_message.UNKNOWN`.
        place: the rank's source location.
        figures: what `figures.py` says of the rank, by name; empty where nobody asks for it.
    """

    rank: int
    beat_ns: int
    key: int
    began_ns: int
    dumped: bool
    state: str
    text: str
    place: str
    figures: Mapping[str, Any] = MappingProxyType({})

    @property
    def waits(self) -> bool:
        """Whether the rank is in a collective of this Communicator."""
        return self.key != 0


class StatusPage:
    """The lines of the ranks of one host, which its ranks share.

    Args:
        memory: shared by these ranks; one line more than there are ranks, then room for the job's description.
        ranks: their numbers in the job.
        own: this rank's number; None for a process that only reads.

    Attributes:
        is_public: whether processes of this user find it, as it is the status page of a whole job.
    """

    def __init__(self, memory: memoryview, ranks: Sequence[int], own: int | None):
        self.ranks, self.is_public = list(ranks), False
        end = _LINE_BYTES * (1 + len(self.ranks))
        lines = [memory[start : start + _LINE_BYTES] for start in range(0, end, _LINE_BYTES)]
        self._common_line, *self._lines = [(line[:_TEXT_START].cast("q"), line[_TEXT_START:]) for line in lines]
        self._description = memory[end:]
        if own is not None:
            self.own = own
            words, _ = self._own_line = self._lines[self.ranks.index(own)]
            words[_STARTED], words[_PID] = start_time(os.getpid()), os.getpid()

    @classmethod
    def of_host(cls, host: Intracomm, ranks: Sequence[int], own: int, public_size: int = 0) -> StatusPage:
        """Return the status page of `host`'s ranks; without shared memory, of this rank alone. Collective.

        public_size: the number of the job's ranks, if these are all of them on this host; 0: the page is not public.
        """
        about = _DESCRIPTION_ROOM + _DESCRIPTION_ROOM_OF_RANK * public_size if public_size else 0
        memory, descriptor = common_memory(host, NAME, _LINE_BYTES * (1 + len(ranks)) + about)
        page = cls.alone(own) if memory is None else cls(memory, ranks, own)
        page.is_public = memory is not None and public_size > 0
        if descriptor >= 0:
            os.close(descriptor)  # each rank's mapping has one of its own
        return page

    @classmethod
    def alone(cls, own: int) -> StatusPage:
        """Return the status page of a single rank, in private memory."""
        return cls(memoryview(bytearray(2 * _LINE_BYTES)), [own], own)

    def describe(self, about: Mapping[str, object]) -> None:
        """Write the job's description, for processes that find the status page, if this is its host's first rank."""
        encoded = json.dumps(about).encode()
        if not self.is_public or self.own != self.ranks[0] or len(encoded) > len(self._description):
            return
        words = self._common_line[0]
        self._description[: len(encoded)] = encoded
        words[_DESCRIPTION_BYTES], words[_RANKS], words[_FORMAT] = len(encoded), len(self.ranks), FORMAT

    def hide(self) -> None:
        """End a public status page: its job's Communicator is closed."""
        self._common_line[0][_FORMAT] = 0

    def write(self, key: int, began_ns: int, text: str, place: str, figures: str = "") -> None:
        """Write this rank's line; the arguments are those of RankStatus, the figures as JSON."""
        words, _ = self._own_line
        words[_VERSION] += 1  # odd: being written
        words[_BEAT_NS], words[_KEY], words[_BEGAN_NS] = perf_counter_ns(), key, began_ns
        _write_text(self._own_line, f"{text}\n{place}", f"\n{figures}" if figures else "")
        words[_VERSION] += 1

    def read(self) -> list[RankStatus]:
        """Return every rank's line, including this rank's."""
        return [self._read(rank, line) for rank, line in zip(self.ranks, self._lines, strict=True)]

    def _read(self, rank: int, line: tuple[memoryview, memoryview]) -> RankStatus:
        words, _ = line
        for _ in range(3):
            version = words[_VERSION]
            beat_ns, key, began_ns, dumped = words[_BEAT_NS], words[_KEY], words[_BEGAN_NS], bool(words[_DUMPED])
            text, place, figures = (_read_text(line) + "\n\n").split("\n", 3)[:3]
            if version % 2 == 0 and version == words[_VERSION]:
                break
        return RankStatus(rank, beat_ns, key, began_ns, dumped, _state(words[_PID], words[_STARTED]), text, place,
                        figures_of(figures))  # fmt: skip

    # --- the common line ---

    @property
    def reported_ns(self) -> int:
        """Time of the last stall report by any rank (perf_counter_ns)."""
        return self._common_line[0][_REPORTED_NS]

    def note_report(self) -> None:
        """Note that this rank has reported a stall."""
        self._common_line[0][_REPORTED_NS] = perf_counter_ns()

    def claim_end(self) -> bool:
        """Return whether this rank has to report why the job ends: one of those that notice it at about the same time.

        Where that rank has not ended it after a while, another one is.
        """
        words, _ = self._common_line
        now_ns = perf_counter_ns()
        if words[_ENDED_BY] and now_ns - words[_ENDED_NS] < _GRANTED_S * 1e9:
            return False
        words[_ENDED_NS], words[_ENDED_BY] = now_ns, self.own + 1
        sleep(_CLAIM_S)  # of several that claim now the last to write is it
        return words[_ENDED_BY] == self.own + 1

    @property
    def dump_folder(self) -> str:
        """The folder to which ranks have to dump their last operations; "": the job goes on."""
        return _read_text(self._common_line)

    @dump_folder.setter
    def dump_folder(self, folder: str) -> None:
        _write_text(self._common_line, folder)

    def note_dump(self) -> None:
        """Note that this rank has written its last operations."""
        self._own_line[0][_DUMPED] = 1


def read_description(memory: memoryview) -> tuple[dict[str, Any], int] | None:
    """Return the description of a status page's job, and its number of ranks; None for a page that is not public.

    Raises ValueError for a status page of another format, and one that is cut off or damaged.
    """
    if len(memory) < _LINE_BYTES:
        raise ValueError("it is cut off")
    words = memory[:_TEXT_START].cast("q")
    if not words[_FORMAT]:
        return None
    if words[_FORMAT] != FORMAT:
        raise ValueError(f"its format is {words[_FORMAT]}, this clcomm reads {FORMAT}")
    start = _LINE_BYTES * (1 + words[_RANKS])
    encoded = bytes(memory[start : start + words[_DESCRIPTION_BYTES]]) if words[_RANKS] > 0 else b""
    if len(encoded) != words[_DESCRIPTION_BYTES] or not encoded:
        raise ValueError("it is cut off")
    about = json.loads(encoded)
    if not isinstance(about, dict) or len(about.get("ranks", ())) != words[_RANKS]:
        raise ValueError("it is damaged")
    return about, words[_RANKS]


def figures_of(text: str) -> Mapping[str, Any]:
    """Return a line's figures; none where they are cut off or not there."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text) if text else None
        if isinstance(found, dict):
            return found
    return {}


def _write_text(line: tuple[memoryview, memoryview], text: str, rest: str = "") -> None:
    """Write text, cut so that the rest behind it fits."""
    words, space = line
    behind = rest.encode(errors="replace")
    encoded = text.encode(errors="replace")[: len(space) - len(behind)] + behind
    space[: len(encoded)] = encoded
    words[_TEXT_BYTES] = len(encoded)


def _read_text(line: tuple[memoryview, memoryview]) -> str:
    words, space = line
    return bytes(space[: words[_TEXT_BYTES]]).decode(errors="replace")


def _state(pid: int, started: int) -> str:
    """Return "running", "stopped" or "dead"; "dead" also if another process has reused the pid."""
    if not started:
        return "running"  # no /proc, or the rank has not written its line yet
    fields = stat_fields(pid)
    if fields == ["?"]:
        return "running"
    if not fields or fields[0] in ("Z", "X") or int(fields[_START_FIELD]) != started:
        return "dead"
    return "stopped" if fields[0] in ("T", "t") else "running"
