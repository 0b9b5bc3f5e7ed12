"""The products in NumPy, whose wheels have OpenBLAS; the parent limits it to one thread."""

from __future__ import annotations

import numpy as np

from benchmarks.kernels.cases import Case
from benchmarks.kernels.worker import Runner, work


def make(case: Case) -> Runner | None:
    """Return a runner of a product; None for other cases."""
    if case.kind != "gemm":
        return None
    m, n, k = (case.sizes[name] for name in "mnk")
    random = np.random.default_rng(0)
    a = random.standard_normal((k, m), np.float32).T if case.variant[0] == "T" else _matrix(random, m, k)
    b = random.standard_normal((n, k), np.float32).T if case.variant[1] == "T" else _matrix(random, k, n)
    out = np.empty((m, n), np.float32)

    def run(repeats: int) -> None:
        for _ in range(repeats):
            np.matmul(a, b, out=out)

    return run


def _matrix(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return random.standard_normal((rows, columns), np.float32)


if __name__ == "__main__":
    work(make)
