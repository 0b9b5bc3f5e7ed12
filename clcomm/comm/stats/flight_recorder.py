"""The flight recorder: a rank's last collectives, written to a file when the job fails."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from clcomm.base.host import variables
from clcomm.base.host.arrays import itemsize_of
from clcomm.comm.stats.events import Call, Collective, Row

SCHEMA = 1
#: How many operations the recorder keeps, and how many of them a message names.
KEPT, NAMED = 64, 4


class FlightRecorder:
    """An observer that keeps the last operations, at the cost of one append each."""

    def __init__(self, kept: int = KEPT):
        self._ring: deque[Collective] = deque(maxlen=kept)
        self.collective_finished = self._ring.append

    def last(self) -> list[Collective]:
        """Return the kept operations, oldest first."""
        return [*self._ring.copy()]

    def operations(self) -> list[Row]:
        """Return the kept operations, oldest first, in JSON-compatible form."""
        return [event._asdict() for event in self._ring.copy()]

    def summary(self) -> str:
        """Return the last few operations in one line, or "none"."""
        return ", ".join(_described(event) for event in [*self._ring.copy()][-NAMED:]) or "none"

    def dump(self, folder: str, rank: int, **more: object) -> str:
        """Write the operations and `more` to rank-N.json in a folder, readable by its owner only; return the path.

        Raises OSError where that file exists or cannot be written.

        Args:
            folder: an existing one.
            rank: this process's.
            more: further fields of the file, JSON-compatible.
        """
        path = os.path.join(folder, f"rank-{rank}.json")
        content = {"schema": SCHEMA, "rank": rank, **more, "operations": self.operations()}
        write_private(path, json.dumps(content, indent=1).encode())
        return path


def write_private(path: str, content: bytes) -> None:
    """Write a new file that its owner alone can read; OSError where it exists or cannot be written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)


def new_dump_folder() -> str:
    """Create a folder private to this user in CLCOMM_DUMP_DIR or the temporary directory; return "" on failure."""
    try:
        return tempfile.mkdtemp(prefix="clcomm-dump-", dir=variables.text("CLCOMM_DUMP_DIR") or None)
    except OSError:
        return ""


def _described(event: Collective) -> str:
    name = f"{event.operation} {event.label!r}" if event.label else event.operation
    part = f" on {event.part}" if event.part else ""
    bucket = f" bucket {event.bucket}" if event.bucket >= 0 else ""
    failed = " (failed)" if event.failed else ""
    return f"#{event.sequence} {name}{part}{bucket} {event.nbytes:,} bytes in {event.seconds * 1e3:.1f} ms{failed}"


# --- A rank's last collectives as PyTorch's flight recorder writes them, for its analyser `torchfrtrace`. ---
# The format is that of `torch.distributed.flight_recorder` (FlightRecorder.hpp, version 2.10): a pickled dictionary for
# each rank, `trace_RANK`, whose entries the analyser matches between the ranks by their numbers.

VERSION = "2.10"
#: The analyser accepts the names of PyTorch's own backends alone.
_BACKEND = "gloo"
_KNOWN = (
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce", "reduce_scatter", "scatter",
)  # fmt: skip
#: The event of a message from rank to rank has the number of the collective before it.
_MESSAGES = ("send", "recv")


#: What has no number is named by what it is for: "all_reduce of 64 float32", "all_gather of 256 bytes", "split".
_PURPOSE = re.compile(r"(\w*)(?:.*?of ([\d,]+) (\w+))?")


class Group(NamedTuple):
    """The ranks of a Communicator, as the analyser names them.

    Attributes:
        name: the same on every rank, and no other Communicator's.
        description: for people, such as "dp"; "undefined" for none.
        ranks: their numbers in the world.
    """

    name: str
    description: str
    ranks: Sequence[int]


class Frame(NamedTuple):
    """A place in the program: a function, its file and a line."""

    name: str
    filename: str
    line: int


def trace_of(
    finished: Iterable[Collective], unfinished: Iterable[tuple[Call, int]], group: Group, frames: Sequence[Frame] = ()
) -> bytes:
    """Return the contents of a rank's file.

    Args:
        finished: its last collectives; those of parts are left out, as these have numbers of their own.
        unfinished: those that it has begun, with their numbers. Where none has one of its own, as in a comparison of
            arguments, it stands with the next number, and as a barrier unless its words name another collective. Waits
            for one rank's message are left out.
        group: the ranks.
        frames: where the program is, innermost first.
    """
    found: dict[int, dict[str, Any]] = {}
    since_epoch_s = time.time() - time.perf_counter()
    for event in finished:
        if not event.part and event.operation not in _MESSAGES:
            state = "started" if event.failed else "completed"
            began_ns = int((event.began_s + since_epoch_s) * 1e9)
            found[event.sequence] = {
                "profiling_name": _profiling_name(event.operation), "state": state, "time_created_ns": began_ns,
                "frames": [], **_arrays(event.operation, event.shape, event.dtype, event.nbytes, len(group.ranks)),
            }  # fmt: skip
    begun = [(call, sequence) for call, sequence in unfinished if call.peer < 0 and not call.takes_any]
    for call, sequence in [each for each in begun if each[0].is_counted] or begun:
        operation, shape, dtype, nbytes = _begun(call)
        found.setdefault(sequence + (not call.is_counted), {
            "profiling_name": _profiling_name(operation), "state": "started", "time_created_ns": time.time_ns(),
            "frames": [each._asdict() for each in frames], **_arrays(operation, shape, dtype, nbytes, len(group.ranks)),
        })  # fmt: skip
    place = {"process_group": (group.name, group.description), "pg_id": 0, "is_p2p": False, "p2p_seq_id": 0}
    entries = [
        {"record_id": number, "collective_seq_id": number, "op_id": number, **place, **found[number]}
        for number in sorted(found)
    ]
    described = {"name": group.name, "desc": group.description, "ranks": str([*group.ranks])}
    return pickle.dumps({"version": VERSION, "pg_config": {group.name: described}, "entries": entries})


def _profiling_name(operation: str) -> str:
    kind = operation.removesuffix("_object")
    return f"{_BACKEND}:{kind if kind in _KNOWN else 'barrier'}"


def _begun(call: Call) -> tuple[str, tuple[int, ...] | None, str, float]:
    """Return operation, shape, dtype and bytes of a call, from its words where it has no number."""
    if call.is_counted:
        return call.operation, call.extent, call.dtype_name, call.nbytes
    purpose = _PURPOSE.match(call.operation)
    assert purpose is not None, "the pattern has a first word at least"
    operation, count, dtype = purpose.groups()
    if count is None:
        return operation, None, "", 0
    return operation, (int(count.replace(",", "")),), "uint8" if dtype == "bytes" else dtype, math.inf


def _arrays(
    operation: str, shape: tuple[int, ...] | None, dtype: str, nbytes: float, ranks: int
) -> dict[str, list[Any]]:
    """Return sizes and dtypes of what goes in and what comes out; empty where ranks may differ in them."""
    if not shape or operation not in _KNOWN or operation in ("all_to_all", "barrier"):
        return {"input_sizes": [[]], "output_sizes": [[]], "input_dtypes": [], "output_dtypes": []}
    given, got = [*shape], [*shape]
    if operation == "all_gather":
        is_whole = nbytes <= math.prod(shape) * itemsize_of(dtype)  # gathered in place
        given, got = ([math.prod(shape) // ranks], given) if is_whole else (given, [ranks, *shape])
    elif operation == "reduce_scatter":
        got = [shape[0] // ranks, *shape[1:]]
    return {"input_sizes": [given], "output_sizes": [got], "input_dtypes": [dtype], "output_dtypes": [dtype]}
