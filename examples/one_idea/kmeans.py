"""Idea: k-means: each rank has some of the points, and the ranks add up what moves the centres.

    mpiexec -n 4 python -m examples.one_idea.kmeans

Look at: the centres are the same to the bit on any number of ranks, as sums of these points are exact in float64.
"""

import hashlib

import numpy as np

from clcomm import Communicator

POINTS, CENTRES, MOST_STEPS = 2_000, 5, 100


def drawn() -> np.ndarray:
    """Return points around five places, (points, 2); their coordinates are multiples of 1/1024."""
    rng = np.random.default_rng(3)
    around = rng.uniform(-10, 10, (CENTRES, 2))
    points = around[rng.integers(0, CENTRES, POINTS)] + rng.standard_normal((POINTS, 2))
    return np.round(points * 1024) / 1024


def nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Return the number of each point's nearest centre."""
    return ((points[:, None] - centres) ** 2).sum(2).argmin(1)


def main() -> None:
    comm = Communicator()
    everyone = drawn() if comm.rank == 0 else None
    shares = None if everyone is None else np.array_split(everyone, comm.size)  # of unequal lengths
    own = comm.scatter(shares, label="points")
    centres = np.empty((CENTRES, 2)) if everyone is None else everyone[:CENTRES].copy()
    comm.broadcast(centres, label="first centres")

    for step in range(1, MOST_STEPS + 1):  # noqa: B007 - the last one is printed
        labels = nearest(own, centres)
        sums = np.zeros((CENTRES, 3))  # of x, of y, and the number of points
        np.add.at(sums, labels, np.column_stack([own, np.ones(len(own))]))
        comm.all_reduce(sums, label="sums")
        moved = np.where(sums[:, 2:] > 0, sums[:, :2] / np.maximum(sums[:, 2:], 1), centres)
        if np.array_equal(moved, centres):  # on all ranks at once: they have the same bits
            break
        centres = moved

    found = comm.gather(nearest(own, centres), label="labels")
    digest = hashlib.sha256(centres.tobytes()).hexdigest()[:16]
    print(f"rank {comm.rank} of {comm.size}: {len(own)} points, {step} steps, centres {digest}")
    if found is not None:
        sizes = np.bincount(np.concatenate(found), minlength=CENTRES)
        print(f"{sizes.sum():,} points in groups of {', '.join(map(str, sizes))}")


if __name__ == "__main__":
    main()
