"""Ranks that start collectives in the background in different orders, or beside blocking ones: all get an error.

Programs are drawn. Before the check existed, they hung; through MPI, prepared ones mixed the ranks' arrays silently.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import MismatchError
from clcomm.comm.transport.host_memory import HostMemory
from clcomm.comm.transport.pending import StartOrder
from tests.helpers import one_line

LENGTH = 3000


class Program:
    """The calls that programs are made of, by letter; each begins with arrays of its own."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.arrays = {name: comm.allocate(4 * LENGTH).view(np.float32) for name in "PQU"}
        self.arrays["V"] = np.zeros(LENGTH, np.float32)  # in no shared memory
        self.calls = {name: comm.all_reduce_async_init(self.arrays[name], label=name) for name in "PQ"}
        self.calls |= {name: self.start_of(name) for name in "UV"}
        small = np.zeros(3)
        self.calls |= {"b": comm.barrier, "r": lambda: comm.all_reduce(small), "o": lambda: comm.broadcast(small)}

    def start_of(self, name: str):
        return lambda: self.comm.all_reduce_async(self.arrays[name], label=name)

    def run(self, names: str, order: list[int]) -> None:
        """Make these calls, then wait in an order of this rank's own."""
        handles = [self.calls[name]() for name in names]
        for at in order:
            if hasattr(handles[at], "wait"):
                handles[at].wait()

    def require_sums(self) -> None:
        """All is as if nothing had happened: each background sum is right, twice."""
        for _ in range(2):
            for number, array in enumerate(self.arrays.values()):
                array[:] = self.comm.rank + number
            self.run("PVUQ", [2, 0, 3, 1])
            for number, array in enumerate(self.arrays.values()):
                assert (array == self.comm.size * ((self.comm.size - 1) / 2 + number)).all()
            self.comm.barrier()


def drawn_programs(seed: int, ranks: int) -> list[str]:
    """Return each rank's calls: the first one's, but that of at least one rank begins to differ somewhere."""
    draw = random.Random(seed)
    common = "".join(draw.sample("PQUVbro", draw.randint(2, 5)))
    programs = [common] * ranks
    for rank in draw.sample(range(ranks), draw.randint(1, ranks - 1)):
        shuffled = draw.sample(common, len(common))
        while "".join(shuffled) == common:
            draw.shuffle(shuffled)
        programs[rank] = "".join(shuffled)
    return programs


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_different_orders_are_every_ranks_error(transport):
    comm = Communicator(transport=transport)
    program = Program(comm)
    for seed in range(25):
        programs = drawn_programs(seed, comm.size)
        mine = programs[comm.rank]
        order = random.Random(seed + comm.rank).sample(range(len(mine)), len(mine))
        with pytest.raises(MismatchError) as caught:
            program.run(mine, order)
        at = next(at for at in range(len(mine)) if len({each[at] for each in programs}) > 1)
        message = one_line(caught)
        for names in {each[at] for each in programs}:
            assert {"b": "barrier", "r": "(sum of 3 float64", "o": "broadcast"}.get(names, f"'{names}'") in message
        assert comm.comm.allgather(message) == [message] * comm.size
        program.require_sums()
    comm.finalize()


@pytest.mark.mpi(min_size=2)
def test_what_is_behind_the_difference_ends_with_its_error(auto):
    program = Program(auto)
    names = "PQUV" if auto.rank else "QPUV"
    handles = [program.calls[name]() for name in names]
    for handle in handles:
        with pytest.raises(MismatchError, match=r"rank 0 in all_reduce 'Q'.*in the background"):
            handle.wait()
    assert auto.stats.total("all_reduce")["failures"] == 4
    program.require_sums()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["P", "V", "r", "b", "o"])
def test_a_rank_that_only_polls_gets_the_error_in_its_next_call(auto, call):
    """The others have raised it, and may never come to that call."""
    program = Program(auto)
    if auto.rank:
        with pytest.raises(MismatchError):
            program.calls["r"]()
    else:
        handle = program.calls["Q"]()
        while not handle.done():
            pass
        with pytest.raises(MismatchError, match=r"rank 0 in all_reduce 'Q'.*in the background"):
            program.calls[call]()
        with pytest.raises(MismatchError):
            handle.wait()
    program.require_sums()


@pytest.mark.mpi(min_size=2)
def test_equal_orders_are_no_error_however_late_ranks_are(auto):
    """No rank that is behind is taken for one that does something else."""
    program, draw = Program(auto), random.Random(auto.rank)
    for seed in range(40):
        names = random.Random(seed).choices("PQUVbro", k=1)[0] + "brPoQU"
        kept = "".join(dict.fromkeys(names))
        for _ in range(draw.randrange(3)):
            auto.comm.Iprobe()
        program.run(kept, draw.sample(range(len(kept)), len(kept)))


@pytest.mark.mpi(min_size=2)
def test_notes_are_of_the_number_that_is_asked_for(auto):
    memory = HostMemory(auto.comm.Dup(), StartOrder.nbytes(auto.size))
    order = StartOrder(memory.scratch, memory.rendezvous)
    for number in (1, 2, 300, 1 << 24, (1 << 24) + 256):  # several in one place of the ring
        tag = 17 + (auto.rank == 1)
        order.note(number, 5)
        memory.comm.Barrier()
        assert not order.differs(number, 5) and not order.differs(number + 256, 5)
        memory.comm.Barrier()
        order.note(number, tag)
        memory.comm.Barrier()
        assert order.differs(number, tag)
        memory.comm.Barrier()
    memory.close()
