"""`clcomm bench`: collectives by size; clcomm/bench.py does it."""

from __future__ import annotations

from clcomm.bench import add_arguments, run
from clcomm.commands.command import Command

COMMAND = Command(
    "bench",
    "time collectives by size, through one transport or several",
    "Time collectives by size, with the columns of nccl-tests: bytes, count, dtype, op, time, algbw, busbw, wrong. "
    "Start it as mpiexec -n 4 clcomm bench. Several transports take turns and are compared. docs/bench.md has more.",
    add_arguments,
    run,
)
