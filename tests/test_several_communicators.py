"""Several Communicators in one process: whatever is started on them may be waited for in any order on any rank.

Each round draws all-reduces of every non-blocking kind on Communicators of all transports, of all ranks and of some.
Each rank starts those of one Communicator in the common order, and everything else in an order of its own. A mistake
in an argument has its place in the common order too: it waits for the other ranks, which raise it with this one.
CLCOMM_PROOF_ORDERS is the number of rounds for each seed.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError, ClcommError
from clcomm.comm.transport import mpi_communicators
from clcomm.comm.transport.mpi_resources import MpiResources
from clcomm.comm.transport.mpi_runtime import world
from clcomm.comm.transport.pending import Pending
from tests.transport.references import FOLDS, drawn, folded, layout_hosts, pretended_host, same_bits

pytestmark = pytest.mark.mpi(min_size=2)

ROUNDS = int(os.environ.get("CLCOMM_PROOF_ORDERS", "6"))
LENGTHS = (1, 17, 1000, 40_001)
DTYPES = ("float32", "float64", "int32")


def mistaken(comm: Communicator, rank: int) -> None:
    """Let `rank` make a mistake in an argument, -1: all ranks; all raise it where they meet."""
    with pytest.raises(ArgumentError, match=r"^op: "):
        if rank in (comm.rank, -1):
            comm.all_reduce_async(np.ones(3), "no such thing")
        comm.barrier()


BLOCKING = {
    "barrier": lambda comm: comm.barrier(),
    "all_reduce": lambda comm: comm.all_reduce(np.ones(3)),
    "all_reduce of shared memory": lambda comm: comm.all_reduce(comm.allocate(64_000).view(np.float32)),
    "all_gather_object": lambda comm: comm.all_gather_object(comm.rank),
    "broadcast": lambda comm: comm.broadcast(np.zeros(20_000)),
    "rendezvous": lambda comm: comm.rendezvous(),
    "prepare": lambda comm: comm.all_reduce_async_init(comm.allocate(4096).view(np.float32)),
    "a new one": lambda comm: Communicator(comm.comm),
    "a mistake of one rank": lambda comm: mistaken(comm, comm.size - 1),
    "a mistake of all": lambda comm: mistaken(comm, -1),
}


@dataclass
class Group:
    """A Communicator, and what it folds in which order."""

    comm: Communicator
    hosts: tuple[tuple[int, ...], ...] = ()
    starts: list = field(default_factory=list)

    @property
    def order(self):
        return self.hosts or (range(self.comm.size),)


@pytest.fixture
def groups(monkeypatch):
    """Communicators of all ranks, two of a part of them, and one over pretended hosts; this rank's."""
    whole = world()
    rank, size = whole.Get_rank(), whole.Get_size()
    made = [Group(Communicator(timeout_s=60)), Group(Communicator(transport="mpi", timeout_s=60))]
    for color, transport in ((rank % 2, "auto"), (rank * 2 // size, "mpi")):
        made.append(Group(Communicator(whole.Split(color, -rank), transport=transport, timeout_s=60)))
    with monkeypatch.context() as patch:
        patch.setattr(mpi_communicators, "host_of", lambda comm: pretended_host("halves", comm))
        nested = Communicator(timeout_s=60)
    made.append(Group(nested, layout_hosts("halves", size) if nested.hosts > 1 and nested.local_size else ()))
    return made


def reduction(group: Group, rng: np.random.Generator, seed: int):
    """Draw an all-reduce: return what starts it, and its check; `rng` is in one state on all ranks of the group."""
    comm, length, dtype = group.comm, int(rng.choice(LENGTHS)), str(rng.choice(DTYPES))
    op = str(rng.choice([op for op in FOLDS if op != "mean" or dtype != "int32"]))
    where, kind = str(rng.choice(["own", "shared", "common"])), str(rng.choice(["started", "prepared"]))
    rows = [drawn(rank, length, dtype, seed) for rank in range(comm.size)]
    source = rows[comm.rank].copy()
    if where != "own":
        source = comm.allocate(max(source.nbytes, 1)).view(dtype)
        source[:] = rows[comm.rank]
    out = comm.allocate_common(source.nbytes).view(dtype) if where == "common" else None
    if kind == "prepared":
        start = comm.all_reduce_async_init(source, op, out=out)
    else:
        start = partial(comm.all_reduce_async, source, op, out=out)

    def check(result: np.ndarray) -> None:
        assert same_bits(result, folded(rows, op, group.order)), f"{kind} {op} of {length} {dtype} in {where} memory"

    return start, check


def interleaved(rng: np.random.Generator, parts: list[list]) -> list:
    """Return the items of all lists, each list's in its order, in an order drawn besides."""
    turns = rng.permutation([index for index, part in enumerate(parts) for _ in part])
    iterators = [iter(part) for part in parts]
    return [next(iterators[turn]) for turn in turns]


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_waiting_completes_with_the_same_bits(groups, seed):
    own = np.random.default_rng([seed, world().Get_rank()])
    common = np.random.default_rng(seed)  # in the same state on all ranks
    left = []  # handles that nothing waits for until the end
    for number in range(ROUNDS):
        drawn_starts = []
        for index, group in enumerate(groups):
            rng = np.random.default_rng([seed, number, index])
            count = int(common.integers(0, 4))
            drawn_starts.append([reduction(group, rng, 100 * number + each) for each in range(count)])
        quiet = int(common.integers(len(groups)))  # a blocking call of this one comes while others are started
        drawn_starts[quiet] = []
        order = interleaved(own, drawn_starts)
        at = int(own.integers(len(order) + 1))
        blocking = BLOCKING[str(common.choice(list(BLOCKING)))]
        handles = []
        for place in range(len(order) + 1):
            if place == at:
                blocking(groups[quiet].comm)
            if place < len(order):
                handles.append((order[place][0](), order[place][1]))
        blocked = []  # in the same order on all ranks
        for index in common.permutation(len(groups))[:2]:
            name = str(common.choice(["all_gather_object", "a mistake of one rank", "a mistake of all"]))
            blocked.append(partial(BLOCKING[name], groups[index].comm))
        steps = [handles[index] for index in own.permutation(len(handles))]
        for step in interleaved(own, [steps, blocked]):
            if isinstance(step, partial):
                step()
                continue
            handle, check = step
            way = own.choice(["wait", "poll", "leave"])
            if way == "leave":
                left.append(step)
                continue
            while way == "poll" and not handle.done():
                time.sleep(0)
            check(handle.wait())
        for group in groups:
            group.comm.barrier()  # common memory is written again only after all have looked
            total = group.comm.stats.total("all_reduce")
            assert total["failures"] == 0
    for handle, check in left:
        assert handle.done()
        check(handle.wait())


def test_two_handles_waited_for_in_opposite_orders():
    """The case that was found: each rank waits first for what the other waits for last."""
    for transport in ("auto", "mpi"):
        comms = [Communicator(transport=transport, timeout_s=60) for _ in range(3)]
        arrays = [comm.allocate(400_000).view(np.float32) for comm in comms]
        for array in arrays:
            array[:] = 1
        handles = [comm.all_reduce_async(array) for comm, array in zip(comms, arrays, strict=True)]
        for handle in handles if comms[0].rank % 2 else handles[::-1]:
            assert (handle.wait() == comms[0].size).all()
        for comm in comms:  # what another wait has completed is counted, once
            assert comm.stats.total("all_reduce")["calls"] == 1


@pytest.mark.parametrize("name", BLOCKING)
def test_a_blocking_call_moves_on_what_another_communicator_has_started(name):
    for transports in (("auto", "auto"), ("auto", "mpi"), ("mpi", "auto"), ("mpi", "mpi")):
        first, second = (Communicator(transport=transport, timeout_s=60) for transport in transports)
        handle = first.all_reduce_async(np.full(50_000, 1.0))
        if first.rank % 2:
            assert (handle.wait() == first.size).all()
        BLOCKING[name](second)
        assert (handle.wait() == first.size).all()


def test_without_checks_too(monkeypatch):
    monkeypatch.setenv("CLCOMM_CHECKS", "off")
    first, second = (Communicator(transport="mpi", timeout_s=60) for _ in range(2))
    handle = first.all_reduce_async(np.full(50_000, 1.0))
    if first.rank % 2:
        handle.wait()
    second.all_reduce(np.ones(50_000))
    assert (handle.wait() == first.size).all()


def test_one_in_the_making_waits_in_nothing(monkeypatch):
    """A watchdog's thread may look at all of a process's Communicators at any time."""
    with Communicator() as first:
        made, seen = MpiResources.__init__, []

        def look(*given, **named) -> None:
            made(*given, **named)
            seen.append(first.lifetime.resources.others_wait())

        monkeypatch.setattr(MpiResources, "__init__", look)
        with Communicator():
            assert seen == [""]


def test_the_stall_message_names_what_the_others_wait_for(capfd):
    """The last rank waits in another Communicator, until the others have reported that it is missing."""
    first, second = (Communicator(stall_warning_s=0.3, timeout_s=100) for _ in range(2))

    def come_late() -> None:
        deadline = time.monotonic() + 60
        while not first.world.status_page.reported_ns and time.monotonic() < deadline:
            time.sleep(0.01)
        second.all_reduce_async(np.ones(9), label="theirs").wait()

    if first.rank == first.size - 1:
        second.all_reduce_async(np.ones(9), label="theirs").wait()
        first.all_reduce_async(np.ones(5), label="ours").wait()
    else:
        late = threading.Thread(target=come_late)
        late.start()
        first.all_reduce_async(np.ones(5), label="ours").wait()
        late.join()
    found = [line for lines in first.all_gather_object(capfd.readouterr().err.splitlines()) for line in lines]
    ranks = rf"of Communicator \d+ \(ranks 0[^)]* and {first.size - 1}\)"
    expected = (
        rf"clcomm: rank 0 has waited [\d.]+ s in all_reduce 'ours' #1 \([^)]*\) {ranks}, called at .*; missing: "
        rf".*rank {first.size - 1} \(in all_reduce 'theirs' #1 \([^)]*\) {ranks} at tests/test_several_comm"
    )
    assert [line for line in found if re.match(expected, line)], found


def test_what_was_interrupted_in_the_middle_fails_and_what_follows_it_does_not():
    """Ctrl-C in a sum: half of it is there, so it can be neither used nor made again."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    queue: deque[Pending] = deque()
    done: list[int] = []
    first, second = Pending(queue, None, interrupted), Pending(queue, None, lambda: done.append(1))
    with pytest.raises(KeyboardInterrupt):
        first.wait()
    with pytest.raises(ClcommError, match="interrupted"):
        first.wait()
    second.wait()
    assert done == [1] and not queue
