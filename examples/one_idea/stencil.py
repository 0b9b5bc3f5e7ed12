"""Idea: a 2-D stencil: ranks in a grid have a tile each, and exchange the edges, their halos, before each step.

    mpiexec -n 4 python -m examples.one_idea.stencil

Look at: the field is the same to the bit on any number of ranks; "halo" in the table is what the edges cost.
"""

import hashlib
from itertools import pairwise

import numpy as np

from clcomm import Communicator, Mesh

ROWS, COLUMNS, STEPS = 60, 48, 100


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """Return where the parts of a length begin and end; they differ by one at most."""
    return list(pairwise([length * part // parts for part in range(parts + 1)]))


def at_first(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the temperature at rows and columns: a hot rectangle."""
    return np.where((abs(rows - 20) < 9) & (abs(columns - 30) < 6), 1.0, 0.0)


def exchange(comm: Communicator, mesh: Mesh, field: np.ndarray) -> None:
    """Receive the neighbours' edges around a tile; columns are a ring, above the first row and below the last is 0."""
    for axis, name in enumerate(mesh.shape):
        edges = np.moveaxis(field, axis, 0)[:, 1:-1]
        before, after = mesh.shift(name, 1, periodic=name == "columns")
        comm.sendrecv(edges[-2], after, 0, edges[0], before, label="halo")
        comm.sendrecv(edges[1], before, 1, edges[-1], after, 1, label="halo")


def main() -> None:
    comm = Communicator()
    rows = max(each for each in range(1, comm.size + 1) if comm.size % each == 0 and each * each <= comm.size)
    mesh = Mesh(comm, rows=rows, columns=-1)
    (top, bottom), (left, right) = (
        bounds(length, mesh.shape[name])[mesh.coordinates[name]]
        for name, length in (("rows", ROWS), ("columns", COLUMNS))
    )
    field = np.zeros((bottom - top + 2, right - left + 2))  # with a halo of one cell
    field[1:-1, 1:-1] = at_first(np.arange(top, bottom)[:, None], np.arange(left, right))

    for _ in range(STEPS):
        exchange(comm, mesh, field)
        around = field[:-2, 1:-1] + field[2:, 1:-1] + field[1:-1, :-2] + field[1:-1, 2:]
        field[1:-1, 1:-1] += 0.2 * (around - 4 * field[1:-1, 1:-1])

    tiles = comm.gather((top, left, field[1:-1, 1:-1]))
    print(f"rank {comm.rank} of {comm.size}: rows {top} to {bottom - 1}, columns {left} to {right - 1}")
    if tiles is not None:
        whole = np.empty((ROWS, COLUMNS))
        for first, start, tile in tiles:
            whole[first : first + tile.shape[0], start : start + tile.shape[1]] = tile
        digest = hashlib.sha256(whole.tobytes()).hexdigest()[:16]
        print(f"after {STEPS} steps: hottest {whole.max():.6f}, sum {whole.sum():.6f}, field {digest}")
        print(comm.stats.table())


if __name__ == "__main__":
    main()
