"""A rank of `benchmarks.slow_link`: trains the GPT example until its held-out loss is low enough.

Arguments: the file of results, the loss, the steps from one evaluation to the next, and the number of held-out windows
tested; then the example's options. The clock runs in steps and in what gives all ranks the same parameters before an
evaluation, until the slowest rank is there; it stands during the evaluation.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.comm.transport.mpi_failures import place_in_world
from clcomm.comm.watch import run
from training.command_line import parse
from training.evaluate import evaluate
from training.text_options import TextOptions, presets
from training.text_session import TextSession


class Clock:
    """Seconds, and how many of them this rank waited in collectives and had a core; collective where it changes."""

    def __init__(self, comm: Communicator):
        self._comm, self._total = comm, np.zeros(3)
        self.start()

    def start(self) -> None:
        self._comm.barrier()
        self._began = self._now()

    def stop(self) -> dict[str, float]:
        """Stop when the slowest rank is there; return the figures so far."""
        self._comm.barrier()
        self._total += self._now() - self._began
        return dict(zip(("seconds", "waited_s", "processor_s"), self._total.tolist(), strict=True))

    def _now(self) -> np.ndarray:
        return np.array([time.perf_counter(), self._comm.in_collectives(), time.process_time()])


def main() -> None:
    (file, target, every, windows), sys.argv[1:] = sys.argv[1:5], sys.argv[5:]
    session = TextSession(parse("examples.gpt", "", TextOptions, presets(place_in_world()[1])))
    trainer, comm, test = session.trainer, session.comm, session.splits.test
    assert test is not None
    samples, batch = min(int(windows), len(test)), session.EVALUATION_BATCH
    course: list[dict[str, float]] = []
    clock = Clock(comm)
    for progress in session.steps():
        if progress.step % int(every):
            continue
        trainer.sync.align_parameters(trainer.model)
        figures = clock.stop()
        loss = evaluate(comm, session.parts.predict, test, samples, batch).loss
        course.append({"steps": progress.step, "loss": float(loss), "load": os.getloadavg()[0], **figures})
        if loss <= float(target):
            break
        clock.start()
    if comm.rank == 0:
        Path(file).write_text(json.dumps(course), encoding="utf-8")


if __name__ == "__main__":
    run(main)
