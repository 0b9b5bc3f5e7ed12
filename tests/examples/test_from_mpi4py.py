"""The examples for mpi4py's users print on 1 to 4 ranks what NumPy computes in one process."""

from __future__ import annotations

import hashlib
import math
import sys

import numpy as np
import pytest

from examples.one_idea import kmeans, pi, stencil
from tests.examples.test_one_idea import launch
from tests.faults.launch import mpiexec


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def estimate() -> list[str]:
    points = pi.BLOCKS * pi.POINTS
    count = 0
    for block in range(pi.BLOCKS):
        x, y = np.random.default_rng((pi.SEED, block)).random((2, pi.POINTS))
        count += np.count_nonzero(np.hypot(x, y) <= 1)
    share = count / points
    assert abs(4 * share - math.pi) < 0.005
    error = 4 * math.sqrt(share * (1 - share) / points)
    return [f"pi is about {4 * share:.6f} after {points:,} points, with a standard error of {error:.6f}"]


def clusters() -> list[str]:
    points = kmeans.drawn()
    centres, steps = points[: kmeans.CENTRES].copy(), 0
    while True:
        steps += 1
        labels = ((points[:, None] - centres) ** 2).sum(2).argmin(1)
        moved = np.array([points[labels == each].mean(0) for each in range(kmeans.CENTRES)])
        if np.array_equal(moved, centres):
            break
        centres = moved
    sizes = np.bincount(labels, minlength=kmeans.CENTRES)
    return [f"{steps} steps, centres {digest(centres)}",
            f"{len(points):,} points in groups of {', '.join(map(str, sizes))}"]  # fmt: skip


def heat() -> list[str]:
    field = stencil.at_first(np.arange(stencil.ROWS)[:, None], np.arange(stencil.COLUMNS))
    for _ in range(stencil.STEPS):
        rows = np.pad(field, ((1, 1), (0, 0)))
        columns = np.pad(field, ((0, 0), (1, 1)), mode="wrap")
        field = field + 0.2 * (rows[:-2] + rows[2:] + columns[:, :-2] + columns[:, 2:] - 4 * field)
    return [f"hottest {field.max():.6f}, sum {field.sum():.6f}, field {digest(field)}"]


PROGRAMS = {"pi": (estimate, 1), "kmeans": (clusters, 0), "stencil": (heat, 1)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_any_number_of_ranks_has_the_values_of_one_process(name: str) -> None:
    """Also without mpiexec, and the last line of each program on rank 0."""
    expected = PROGRAMS[name][0]()
    for ranks in (0, 1, 2, 3, 4):
        start = [mpiexec(), "-n", str(ranks)] if ranks else []
        ended = launch([*start, sys.executable, "-m", f"examples.one_idea.{name}"])
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
        lines = ended.stdout.splitlines()
        assert sum(line.startswith(f"rank {rank} of {max(ranks, 1)}") for line in lines for rank in range(4)) == max(
            ranks, 1
        )
        for text in expected:
            assert any(text in line for line in lines), (ranks, text, ended.stdout)
