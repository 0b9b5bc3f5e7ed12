"""Communicators that are dropped without finalize(): MPI and /dev/shm get back what they held.

MPICH has room for some 400. CLCOMM_PROOF_DROPPED is how many are made; where they are few, garbage is looked for more
often.
"""

from __future__ import annotations

import gc
import os
from functools import partial

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError, ResourceError
from clcomm.comm.transport import mpi_resources
from clcomm.comm.transport.mpi_runtime import world
from clcomm.comm.watch.job import this_job
from clcomm.engine import Linear
from clcomm.sync.synchronizer import Synchronizer

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.drops_communicators]

DROPPED = int(os.environ.get("CLCOMM_PROOF_DROPPED", "60"))
#: Whether few are made: half as many on more than two ranks, where each takes longer.
ARE_FEW = DROPPED <= 1000
COLLECT_AFTER = 4 if ARE_FEW else 64
#: How many may be there at a time: garbage, what waits for another rank's, and what is kept for up to 8 turns.
MOST = 2 * COLLECT_AFTER + 30
#: How much of /dev/shm each takes, a rank; and how many of MPI's communicators.
WINDOW_BYTES, PARTS = 1 << 20, 6


class Holder:
    """Refers to itself, so that it goes when Python looks for garbage."""

    def __init__(self, comm: Communicator):
        self.comm, self.itself = comm, self


def used_of_shared_memory() -> int:
    stat = os.statvfs("/dev/shm")
    return (stat.f_blocks - stat.f_bavail) * stat.f_frsize


def spare_communicators() -> int:
    """Return how many more MPI has room for; 4,000 where that is more."""
    made = []
    try:
        while len(made) < 4000:
            made.append(world().Dup())
    except Exception:  # MPI's own
        pass
    for each in made:
        each.Free()
    return len(made)


def one_of(kind: str) -> object:
    """Make a Communicator and something with it; return what keeps it."""
    comm = Communicator(transport="mpi" if kind == "through MPI" else "auto")
    if kind == "in a cycle":
        return Holder(comm)
    if kind == "with windows":
        memory = comm.allocate(WINDOW_BYTES)
        memory[:] = comm.rank
        return comm, memory, comm.allocate_common(4096)
    if kind == "windows in a cycle":
        return Holder(comm), comm.allocate(WINDOW_BYTES)
    if kind == "prepared":
        return comm.all_reduce_init(comm.allocate(4096).view(np.float32))
    if kind == "in flight":
        comm.all_reduce_async(np.ones(20_000))
    if kind == "prepared in flight":
        comm.all_reduce_async_init(comm.allocate(80_000).view(np.float32))()
    if kind == "a model's":
        model, sync = Linear(8, 4), Synchronizer(comm)
        sync.broadcast_parameters(model)
        return model, sync
    if kind == "of some ranks":
        part = world().Split(comm.rank % 2, comm.rank)
        other = Communicator(part)
        part.Free()
        return comm, other
    if kind == "finalized":
        comm.finalize()
    return comm


KINDS = (
    "plain", "through MPI", "in a cycle", "with windows", "windows in a cycle", "prepared", "in flight",
    "prepared in flight", "a model's", "of some ranks", "finalized",
)  # fmt: skip


def test_dropped_communicators_take_nothing_for_good(monkeypatch):
    monkeypatch.setattr(mpi_resources, "_COLLECT_AFTER", COLLECT_AFTER)
    rank = world().Get_rank()
    own, common = np.random.default_rng([1, rank]), np.random.default_rng(2)
    kept: list[tuple[int, object]] = []  # until when, which each rank draws for itself
    first, most, spare = used_of_shared_memory(), 0, spare_communicators()
    size = world().Get_size()
    for number in range(DROPPED // size if ARE_FEW else DROPPED):
        kept = [(until, thing) for until, thing in kept if until > number]
        kept.append((number + int(own.integers(0, 9)), one_of(str(common.choice(KINDS)))))
        if own.integers(20) == 0:
            gc.collect()
        most = max(most, used_of_shared_memory() - first)
    assert most < MOST * (size * WINDOW_BYTES + (1 << 19)), f"{most >> 20} MiB"
    assert len(this_job().communicators.dropped) + len(this_job().communicators.open) < MOST
    assert spare - spare_communicators() < MOST * PARTS
    assert Communicator().all_reduce(np.ones(3)).tolist() == [size] * 3


def test_memory_that_is_still_used_outlives_its_communicator():
    comm = Communicator()
    memory = comm.allocate(WINDOW_BYTES)
    memory[:] = comm.rank + 1
    del comm
    for _ in range(3):
        latest = Communicator()
        latest.all_reduce(np.ones(3))
    assert (memory == latest.rank + 1).all()


def test_a_tensor_on_the_memory_of_a_dropped_model_stays_whole():
    comm = Communicator()
    model, sync = Linear(8, 4), Synchronizer(comm)
    sync.broadcast_parameters(model)
    weight = model.weight.detach()
    expected = weight.numpy()
    del comm, model, sync
    for _ in range(3):
        gc.collect()
        latest = Communicator()
        latest.allocate(WINDOW_BYTES)[:] = 255
    assert weight.numpy().tobytes() == expected.tobytes()


def test_room_is_made_of_what_was_dropped(monkeypatch):
    """Where /dev/shm is full, an existing Communicator's allocate frees what others left."""
    staying, going = Communicator(), Communicator()
    memory = going.allocate(WINDOW_BYTES)
    holder = Holder(going), memory
    Communicator().barrier()  # the process remembers the latest
    del going, memory, holder
    gc.collect()
    shared, refused = staying.world.shared, []
    if shared is None:
        pytest.skip("no shared memory")
    before = len(this_job().communicators.dropped)
    make_room = shared.make_room
    monkeypatch.setattr(shared, "make_room", lambda *a: make_room(*a) if refused else refused.append(1))
    assert staying.world.shared.holds(staying.allocate(100))
    assert before and len(this_job().communicators.dropped) < before


def test_ranks_that_keep_theirs_hold_the_others_up_nowhere():
    """A Communicator that one rank keeps is not freed; those after it are."""
    rank = world().Get_rank()
    kept = Communicator()
    number = kept.lifetime.resources.key[0]
    if rank:
        kept = None
    for _ in range(5):
        Communicator().barrier()
    numbers = [each.key[0] for each in this_job().communicators.dropped]
    if world().Get_size() > 1:
        assert (number in numbers) == (rank > 0)
    assert len(numbers) <= 2 + 1
    assert kept is None or kept.lifetime.resources in this_job().communicators.open


def test_a_constructor_that_fails_takes_nothing_for_good():
    for number in range(20):
        with pytest.raises((ArgumentError, AttributeError)):
            if number % 2:
                Communicator(observers=[object()])
            else:
                Communicator(transport="no such")
    gc.collect()  # tracebacks refer to what failed
    world().Barrier()
    Communicator().barrier()
    assert len(this_job().communicators.dropped) < 5


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("left", (0, 3, 7) if ARE_FEW else range(9))
def test_too_many_are_an_error_of_one_line_on_every_rank(left):
    """With so many of MPI's communicators left: at whatever step they run out."""
    size = world().Get_size()
    if ARE_FEW and size > 2 and left != (3, 0, 7)[size % 3]:
        pytest.skip("one of them on each number of ranks above 2")
    with Communicator() as comm:
        taken = [world().Dup() for _ in range(spare_communicators() - left)]
        if len(taken) >= 3990:
            pytest.skip("this MPI has no such limit")
        errors, kept = [], []
        try:
            while len(kept) < 10:
                kept.append((Communicator if left % 2 else partial(comm.allocate, 4096))())
        except ResourceError as error:
            errors = world().allgather(str(error))
        for each in taken:
            each.Free()
        kept.clear()
        assert "\n" not in errors[0] and len(errors) == comm.size
        assert errors[0].startswith("Communicator: expected MPI to have communicators left, but it reports: ")
        Communicator().allocate(4096)
