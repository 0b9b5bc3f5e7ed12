"""`clcomm bench`: time collectives by size, with clcomm/insight/measure/bench.py."""

from __future__ import annotations

from clcomm.insight.measure.bench import add_arguments, run
from clcomm.tools.commands.command import Command

COMMAND = Command(
    "bench",
    "time collectives by size, through one transport or several",
    "Time collectives by size, with the columns of nccl-tests: bytes, count, dtype, op, time, algbw, busbw, wrong. "
    "Start it as mpiexec -n 4 clcomm bench. Several transports take turns and are compared. docs/bench.md has more.",
    add_arguments,
    run,
    (
        ("mpiexec -n 4 clcomm bench", "all-reduce from small to large arrays"),
        ("mpiexec -n 4 clcomm bench --transport auto mpi", "shared memory beside MPI, in turns"),
    ),
)
