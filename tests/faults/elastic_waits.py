"""Ranks that wait for one that dies, in every kind of wait: `elastic_waits.py TRANSPORT KIND...`, on two ranks more.

For each kind in turn the last rank dies once the others are in that wait, and these go on without it. Each writes a
line: the kind, and "lost" where the wait ended with the error of a lost rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from clcomm import Communicator
from clcomm.engine.device import default_device
from clcomm.parallel.pipeline.link import LinkPlan, Links
from clcomm.sync import elastic

#: How long the others have to come to their wait.
COMES_S = 0.4
LARGE = 1 << 16
Wait = Callable[[], object]


def shared(comm: Communicator, count: int = LARGE) -> np.ndarray:
    return comm.allocate(count * 4).view(np.float32)


def private(count: int = LARGE) -> np.ndarray:
    return np.ones(count, np.float32)


def started(comm: Communicator) -> Callable:
    """Return a prepared all-reduce that begins in the background, and has run once."""
    start = comm.all_reduce_async_init(shared(comm), out=comm.allocate_common(LARGE * 4).view(np.float32))
    start().wait()
    return start


def awaited(start: Callable, *arguments: object) -> None:
    start(*arguments).wait()


def polled(start: Callable, *arguments: object) -> None:
    handle = start(*arguments)
    while not handle.done():
        time.sleep(1e-3)
    handle.wait()


def prepared(comm: Communicator) -> Wait:
    reduce = comm.all_reduce_init(shared(comm))
    reduce()
    return reduce


def begun_and_barrier(comm: Communicator) -> Wait:
    start = started(comm)
    return lambda: (start(), comm.barrier())


def two_queues(comm: Communicator) -> Wait:
    other = Communicator(comm.comm, transport=comm.transport)
    first, second = started(comm), started(other)

    def wait() -> None:
        begun, last = first(), second()
        last.wait()
        begun.wait()

    return wait


def part_of_the_living(comm: Communicator) -> Wait:
    """Wait in a part without the dead rank, for rank 0, which waits for it."""
    part = comm.split(0 if comm.rank < comm.size - 1 else None)
    return comm.barrier if part is None or comm.rank == 0 else part.barrier


def within_mpi(comm: Communicator) -> Wait:
    """As `part_of_the_living`, in a call of MPI's that only MPI can end."""
    part = Communicator(comm.comm).split(0 if comm.rank < comm.size - 1 else None)
    return comm.barrier if part is None or comm.rank == 0 else part.comm.Barrier


def channel(comm: Communicator) -> Wait:
    size = comm.size
    plans = [LinkPlan("activations", rank, rank, (rank + 1) % size, 2, (1024,), "<f4") for rank in range(size)]
    (receiver,) = Links(comm, default_device(), plans).received.values()
    receiver.expect(1)
    return lambda: receiver.take(0)


def exchanged(comm: Communicator) -> Wait:
    arrays = [private(1000) for _ in range(comm.size)]
    return lambda: comm.all_to_all(arrays, [np.empty_like(each) for each in arrays])


KINDS: dict[str, Callable[[Communicator], Wait]] = {
    "barrier": lambda comm: comm.barrier,
    "slots": lambda comm: partial(comm.all_reduce, shared(comm, 16)),
    "shards": lambda comm: partial(comm.all_reduce, shared(comm, 1 << 18)),
    "private": lambda comm: lambda: comm.all_reduce(private(1 << 18)),
    "ring": lambda comm: lambda: comm.all_reduce(private(), algorithm="ring"),
    "gather": lambda comm: lambda: comm.gather(private(64)),
    "exchanged": exchanged,
    "objects": lambda comm: lambda: comm.all_gather_object(1),
    "rendezvous": lambda comm: comm.rendezvous,
    "allocate": lambda comm: lambda: comm.allocate(1 << 20),
    "split": lambda comm: lambda: comm.split(0),
    "made": lambda comm: lambda: Communicator(comm.comm),
    "finalize": lambda comm: comm.split(0).finalize,
    "prepared": prepared,
    "begun": lambda comm: partial(awaited, comm.all_reduce_async, shared(comm)),
    "begun_polled": lambda comm: partial(polled, comm.all_reduce_async, shared(comm)),
    "begun_private": lambda comm: lambda: comm.all_reduce_async(private()).wait(),
    "started": lambda comm: partial(awaited, started(comm)),
    "started_polled": lambda comm: partial(polled, started(comm)),
    "begun_and_barrier": begun_and_barrier,
    "two_queues": two_queues,
    "part_of_the_living": part_of_the_living,
    "within_mpi": within_mpi,
    "channel": channel,
}


def main(transport: str, *kinds: str) -> None:
    comm = Communicator(transport=transport)
    for kind in kinds:
        wait = KINDS[kind](comm)
        comm.barrier()
        if comm.rank == comm.size - 1:
            time.sleep(COMES_S)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            wait()
            outcome = "returned"
            comm.barrier()
        except Exception as error:
            outcome = "lost" if elastic.is_lost_peer(error) else f"{type(error).__name__}: {error}"
        os.write(1, f"{kind} {outcome}\n".encode())
        comm = elastic.survivors_of(comm)


if __name__ == "__main__":
    main(*sys.argv[1:])
