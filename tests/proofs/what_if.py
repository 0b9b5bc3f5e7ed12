"""What `clcomm report --what-if` says of real runs with a planted delay, beside the same runs without it.

    mpiexec -n 2 python -m tests.proofs.what_if ROUNDS data@1 optimizer@0 ...

The plants are those of tests/report/planted.py: sleeps of 25 ms, which cost no core. All ranks of both runs have one in
forward, so that a step is as long as the delay. Rank 0 prints a line for each plant: the medians over the rounds of the
slowed run's steps, of what is predicted without the delay, and of the healthy run's, and how far the prediction is off.
"""

from __future__ import annotations

import statistics
import sys

from clcomm import Communicator
from clcomm.comm.watch.endings import run
from clcomm.insight.report.run_costs import Analysis
from clcomm.insight.report.what_if import what_ifs
from tests.report.planted import run_of

#: What slows all ranks of both runs.
HEALTHY = "python@all"


def step_s(analysis: Analysis) -> float:
    return analysis.per_step(analysis.training_s) or 0.0


def predicted_s(analysis: Analysis, change: str) -> float:
    return step_s(analysis) - next((each.saved_s for each in what_ifs(analysis) if each.change == change), 0.0)


def main() -> None:
    rounds, *plants = sys.argv[1:]
    comm = Communicator()
    for plant in plants:
        rows = []
        where = plant.partition("@")[2]
        change = "without waits for data" if where == "all" else f"without rank {where}'s delay"
        for _ in range(int(rounds)):
            found = []
            for names in (f"{HEALTHY}+{plant}", HEALTHY):
                comm.stats.reset()
                found.append(Analysis(run_of(names, comm)))
            slowed, healthy = found
            rows.append((step_s(slowed), predicted_s(slowed, change), step_s(healthy)))
        if comm.rank == 0:
            slowed_s, predicted, healthy_s = (statistics.median(each) * 1e3 for each in zip(*rows, strict=True))
            off = predicted / healthy_s - 1
            print(f"{plant}: {slowed_s:.2f} ms a step, {predicted:.2f} predicted, {healthy_s:.2f} measured, {off:+.1%}")


if __name__ == "__main__":
    run(main)
