"""Idea: a Communicator knows its ranks, moves NumPy arrays between them, and counts what it moves.

    mpiexec -n 2 python -m examples.one_idea.hello

Look at: the sum is the same on every rank; the table at the end has a line for each kind of call.
"""

import numpy as np

from clcomm import Communicator

with Communicator() as comm:  # mpiexec's ranks; without mpiexec, a world of one
    own = np.full(3, comm.rank + 1, np.float32)
    total = comm.all_reduce(own, label="hello")  # in place: `own` holds the sum now
    names = comm.all_gather_object(f"rank {comm.rank}")
    print(f"rank {comm.rank} of {comm.size}, {comm.local_rank} on its host: sum {total.tolist()}, ranks {names}")
    if comm.rank == 0:
        print(comm.stats.table())
