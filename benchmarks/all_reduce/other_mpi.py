"""Another MPI's in-place Allreduce, in an environment of its own, which has mpi4py and NumPy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.all_reduce.worker import Measured, expected_sum, rank_values, timed
from benchmarks.workers import serve


def main() -> None:
    comm, systems = MPI.COMM_WORLD, dict[int, Measured]()

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        if "library" in request:
            name = MPI.Get_library_version().partition("\n")[0].partition(",")[0]
            return {"library": name.replace("(R)", "").replace(" Library", "").removesuffix(" for Linux* OS").strip()}
        nbytes = request["nbytes"]
        if nbytes not in systems:
            values = rank_values(nbytes // 4, comm.rank)
            comm.Allreduce(MPI.IN_PLACE, values)
            np.testing.assert_array_equal(values, expected_sum(values.size, comm.size))
            systems[nbytes] = Measured(lambda: comm.Allreduce(MPI.IN_PLACE, values), values, values, comm.size)
        return timed(systems[nbytes], request["repeats"])

    serve(sys.argv[1], comm.rank, handle)


if __name__ == "__main__":
    main()
