"""`clcomm tune`: latency and bandwidth of all-reduces, and a recommended bucket size."""

from __future__ import annotations

from clcomm.insight.measure.tune import add_arguments, run
from clcomm.tools.commands.command import Command

COMMAND = Command(
    "tune",
    "fit latency and bandwidth, recommend a bucket size, predict scaling",
    "Measure all-reduces on groups of the job's ranks, fit latency and bandwidth, recommend a bucket size for a model, "
    "and predict 2 to 4,096 ranks. Start it as mpiexec -n 4 clcomm tune; with --from FILE it measures nothing. "
    "docs/bench.md has more.",
    add_arguments,
    run,
    (
        ("mpiexec -n 4 clcomm tune", "measure the cost model and recommend a bucket size"),
        ("clcomm tune --from bench.json --bytes 25MiB --tensors 60", "predict from a file of clcomm bench --json"),
    ),
)
