"""Idea: Monte Carlo: ranks draw different points, and one of them gets the sum of their counts.

    mpiexec -n 4 python -m examples.one_idea.pi

Look at: the estimate is the same on any number of ranks, as each block of points has a generator of its own.
"""

import math

import numpy as np

from clcomm import Communicator

BLOCKS, POINTS, SEED = 120, 20_000, 7


def hits(block: int) -> int:
    """Return how many points of a block, in the unit square, lie within a quarter of the unit circle."""
    x, y = np.random.default_rng((SEED, block)).random((2, POINTS))
    return int((x * x + y * y <= 1).sum())


def main() -> None:
    comm = Communicator()
    own = range(comm.rank, BLOCKS, comm.size)  # every comm.size-th block
    counted = np.array([sum(map(hits, own)), len(own)])

    total = comm.reduce(counted, "sum", root=0, label="hits")  # None on the other ranks
    before = comm.exscan(counted[1])  # how many blocks lower ranks have; None on rank 0, which has none before it
    print(f"rank {comm.rank} of {comm.size}: {len(own)} blocks, {before or 0} on the ranks before it")

    if total is not None:
        count, blocks = total.tolist()
        points = blocks * POINTS
        pi = 4 * count / points
        error = 4 * math.sqrt(count / points * (1 - count / points) / points)
        print(f"pi is about {pi:.6f} after {points:,} points, with a standard error of {error:.6f}")


if __name__ == "__main__":
    main()
