"""Ranks' programs: the real code, on numbers whose sums tell a wrong rank, turn or repetition."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from clcomm.comm.collectives.in_flight import StartGuard
from clcomm.comm.transport import fused, shared, work_queue
from clcomm.comm.transport.fused import OwnPart, words_of
from clcomm.comm.transport.pending import Pending, StartOrder, _started
from clcomm.comm.transport.reduction import prepared_reduction
from clcomm.comm.transport.rendezvous import DifferentOperations, HostRendezvous
from clcomm.comm.transport.slots import SharedSlots, shared_bytes
from clcomm.comm.transport.staged import SlotReduction
from clcomm.comm.transport.started import StartedReduction
from clcomm.comm.transport.work_queue import WorkQueueReduction
from tests.model_checker import kernel
from tests.model_checker.memory import (
    LostRank,
    data,
    load,
    meeting,
    progress,
    shared_memory,
    stepwise,
)
from tests.model_checker.scenario import State

#: The kernel's source, which planted bugs change.
SOURCE = {"text": kernel.SOURCE.read_text()}


def value(rank: int, turn: int) -> int:
    """Return a rank's number of a turn: sums of other ranks', of other turns or of a rank twice are others."""
    return 10**rank * (turn + 1)


def total(ranks: int, turn: int) -> int:
    return sum(value(rank, turn) for rank in range(ranks))


def on_ranks(ranks: int, code: Callable[..., Any], *args: Any, **how: Any) -> dict[str, Callable[[], Any]]:
    """Return each rank's program, which ends with LOST where it learns that another has died."""

    def program(rank: int) -> Any:
        _started.queues.clear()
        with stepwise():
            try:
                return code(meeting(rank, ranks, **how), rank, ranks, *args)
            except LostRank:
                return LOST

    return {f"rank {rank}": partial(program, rank) for rank in range(ranks)}


LOST = "another rank has died"


def all_get(expected: Any) -> Callable[[dict[str, Any], State], str]:
    """Return the check that every rank's result is this one; ranks that know of a death have none."""

    def check(last: dict[str, Any], state: State) -> str:
        wrong = [f"{name} got {found}" for name, found in last.items() if found not in (expected, None, LOST)]
        lost = [name for name, found in last.items() if found == LOST]
        if lost and None not in last.values():
            wrong.append(f"{lost[0]} heard of a death, and none has died")
        return f"{'; '.join(wrong)}; expected {expected}" if wrong else ""

    return check


# --- programs ---


def exchanges(point: HostRendezvous, rank: int, ranks: int, turns: int) -> Any:
    found = []
    for turn in range(turns):
        point.announce(7 + turn)
        found.append(tuple(point.exchange([value(rank, turn)])[:, 0].tolist()))
    return tuple(found)


def different_calls(point: HostRendezvous, rank: int, ranks: int) -> Any:
    found = []
    for tag in (7, 7 + (rank == 1), 9):
        point.announce(tag)
        try:
            point.barrier()
            found.append(tag)
        except DifferentOperations:
            found.append("differ")
    return tuple(found)


def slots(point: HostRendezvous, rank: int, ranks: int, turns: int) -> Any:
    sides = [data(ranks, 1, 64 * side) for side in range(2)]
    reduction = SlotReduction(
        point, [[row.view(np.uint8) for row in side] for side in sides], np.zeros(1, np.int64), "sum", None
    )
    out, found = np.zeros(1, np.int64), []
    for turn in range(turns):
        point.announce(7)
        reduction.reduce(np.array([value(rank, turn)]), out)
        found.append(int(out[0]))
    return tuple(found)


def shards(point: HostRendezvous, rank: int, ranks: int, turns: int) -> Any:
    """Each rank folds its element into memory that all read; own rows are written anew for each turn."""
    rows, (out,) = data(ranks, ranks), data(1, ranks, 1024)
    own = slice(rank, rank + 1)
    reduce = partial(shared._fold_between, point, prepared_reduction([row[own] for row in rows], out[own], "sum"))
    return _turns(point, rank, turns, rows, out, reduce)


def one_kernel(point: HostRendezvous, rank: int, ranks: int, turns: int) -> Any:
    """The same in the kernel, which polls once before it leaves the wait to Python."""
    rows, (out,) = data(ranks, ranks), data(1, ranks, 1024)
    words = words_of(point, 1)
    words[fused.RANK + 2 : fused.RANK + 4] = rank, rank + 1  # FIRST and LAST
    launch = partial(kernel.Kernel(ranks, SOURCE["text"], words, rows, out).run, "meet_fold_leave", point.cells)
    own = slice(rank, rank + 1)
    reduce = OwnPart(point, 0, words.data, launch, fold=prepared_reduction([row[own] for row in rows], out[own], "sum"))
    with mock.patch.object(fused, "perf_counter_ns", lambda: 0):
        return _turns(point, rank, turns, rows, out, reduce)


def _turns(point: HostRendezvous, rank: int, turns: int, rows: Any, out: Any, reduce: Callable[[], None]) -> Any:
    """Return the sum that this rank reads in each turn."""
    found = []
    for turn in range(turns):
        rows[rank][...] = value(rank, turn)
        point.announce(7)
        reduce()
        found.append(tuple(out.tolist()))
    return tuple(found)


def work_queue_sums(
    point: HostRendezvous, rank: int, ranks: int, turns: int, parts: int, polls: int, apart: bool = False
) -> Any:
    """Ranks take parts of a sum into row 0, where a part that is summed twice is a wrong one.

    apart: into memory apart from the rows, which ranks may then write anew at once.
    """
    rows = data(ranks, parts)
    out = data(1, parts, 1024)[0] if apart else rows[0]
    found = []

    def prepare(words: np.ndarray) -> Callable[[], object]:
        words[fused.POLLS] = polls
        return partial(kernel.Kernel(ranks, SOURCE["text"], words, rows, out).run, "meet_and_share", point.cells)

    with (
        mock.patch.object(work_queue, "part_size", lambda array: 1),
        mock.patch.object(fused, "perf_counter_ns", lambda: 0),
    ):
        reduce = WorkQueueReduction(point, 0, out, prepare)
        for turn in range(turns):
            rows[rank][...] = value(rank, turn)
            point.announce(7)
            reduce()
            found.append(tuple(out.tolist()))
            if turn + 1 < turns and not apart:
                point.leave()  # rank 0 writes its row anew, which is the result
    return tuple(found)


def _started_reduction(point: HostRendezvous, rank: int, ranks: int, index: int, queue: deque[Pending]) -> Any:
    rows, (out,) = data(ranks, ranks, 2048 * index), data(1, ranks, 2048 * index + 1024)
    counters = shared_memory(16384 + 1024 * index, 64 * ranks).view(np.int64).reshape(ranks, 8)
    memory = SimpleNamespace(rank=rank, fence=point._fence, rendezvous=point, comm=SimpleNamespace(Iprobe=progress))
    own = slice(rank, rank + 1)
    fold = prepared_reduction([row[own] for row in rows], out[own], "sum")
    return rows, out, StartedReduction(memory, counters, queue, fold)


def started(point: HostRendezvous, rank: int, ranks: int, turns: int, count: int) -> Any:
    """Reductions in the background, for which ranks wait in different orders."""
    queue: deque[Pending] = deque()
    made = [_started_reduction(point, rank, ranks, index, queue) for index in range(count)]
    found = []
    for turn in range(turns):
        handles = []
        for rows, _, reduction in made:
            rows[rank][...] = value(rank, turn)
            handles.append(reduction.start())
        for index in range(count):
            handles[(index + rank) % count].wait()
        for _, out, _ in made:
            found.append(tuple(out.tolist()))
    return tuple(found)


def started_against_blocking(point: HostRendezvous, rank: int, ranks: int) -> Any:
    """Rank 1 comes to a blocking call where the others wait for a reduction in the background: all get the error."""
    queue: deque[Pending] = deque()
    order = StartOrder(shared_memory(20480, StartOrder.nbytes(ranks)), point)
    found = []
    if rank == 1:
        point.announce(9)
        try:
            point.barrier()
        except DifferentOperations:
            found.append("differ")
    else:
        rows, _, reduction = _started_reduction(point, rank, ranks, 0, queue)
        rows[rank][...] = value(rank, 0)
        order.note(1, 7)
        handle = reduction.start()

        def settle() -> Exception:
            handle.take_back()
            return DifferentOperations()

        handle.guard_with(StartGuard(point, order, 1, 7, settle, lambda order: None))
        try:
            handle.wait()
        except DifferentOperations:
            found.append("differ")
    point.announce(8)
    point.barrier()
    return tuple(found)


def ring(point: HostRendezvous, rank: int, ranks: int, messages: int) -> Any:
    """Rank 0 sends numbers through two slots to rank 1."""
    host: Any = SimpleNamespace(fence=point._fence, rendezvous=point)
    ends = SharedSlots(shared_memory(8192, shared_bytes(2, 8)), 2, 8, host)
    places, found = [slot.view(np.int64) for slot in ends.slots], []
    for message in range(messages):
        if rank == 0:
            ends.wait_for_room()
            places[ends.next_slot()][...] = value(0, message)
            ends.send()
        else:
            ends.wait_for_arrival()
            found.extend(load(places[ends.take()]))
            ends.release()
    return tuple(found) if rank else None
