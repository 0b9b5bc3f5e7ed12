"""A training on two ranks, of which rank 1 has a slow loader: `... docs.draw.slow_rank_program TRACE REPORT`."""

from __future__ import annotations

import sys
import time
from typing import Any

from clcomm import run
from clcomm.insight.report.record import write_document
from training.options import TrainingOptions
from training.session import Session

SLOW_RANK, LATE_S, STEPS, BATCH = 1, 0.025, 150, 64


def main() -> int:
    trace, report = sys.argv[1:]
    session = Session(TrainingOptions(batch_size=BATCH, max_steps=STEPS, eval=False, quiet=True, trace=trace))
    data = session.trainer.loader.dataset
    batch_of = data.batch

    def late_batch(*places: Any) -> Any:
        time.sleep(LATE_S)
        return batch_of(*places)

    if session.comm.rank == SLOW_RANK:
        data.batch = late_batch  # type: ignore[method-assign, assignment]
    result = session.run()
    write_document(report, result.as_report(session.options, session.comm, session.splits.name), session.comm)
    session.comm.rendezvous()
    return 0


if __name__ == "__main__":
    run(main)
