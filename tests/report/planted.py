"""Short trainings in one job, each slowed in one phase: `mpiexec -n N python -m tests.report.planted ROUNDS NAME ...`.

Rank 0 prints a JSON line for each: the round, the plant's name, and the sentences of its report. A plant's name ends in
"@all" or in "@" and the rank that it slows.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.engine import Tensor, no_grad
from clcomm.insight.report.recording import Run
from clcomm.insight.report.report import build
from clcomm.insight.report.schema import checked_run
from clcomm.sync.compression.quantized import Float16
from training import session, trainer
from training.options import TrainingOptions

LATE_S = 0.025
#: What is slowed, and the options that the run needs for it.
PLANTS: dict[str, dict[str, Any]] = {
    "data": {}, "python": {}, "kernels": {}, "compression": {"compression": "fp16"}, "clipping": {"clip_norm": 1.0},
    "optimizer": {}, "between": {}, "evaluation": {"eval": True},
}  # fmt: skip


def _after(function: Callable[..., Any], work: Callable[[], None] = lambda: time.sleep(LATE_S)) -> Callable[..., Any]:
    """Return the function with some work before it."""

    def slowed(*args: Any, **settings: Any) -> Any:
        work()
        return function(*args, **settings)

    return slowed


def _multiply(made: trainer.Trainer) -> Callable[[], None]:
    """Return work for a device: products of matrices that take about as long as LATE_S."""
    device = made.parts.opencl
    square = Tensor(np.ones((768, 768), np.float32), device)

    def work() -> None:
        with no_grad():
            (square @ square).numpy()

    return work


@contextmanager
def planted(name: str, comm: Communicator) -> Iterator[Callable[[Any], None]]:
    """Slow this rank down in a phase; yields what a session is given to once it is made."""
    phase, _, where = name.partition("@")
    if where != "all" and int(where) != comm.rank:
        yield lambda made: None
        return

    def change(made: Any) -> None:
        own = made.trainer
        if phase == "evaluation":
            late = _after(made.parts.predict, lambda: time.sleep(10 * LATE_S))
            made.parts = replace(made.parts, predict=late)
        if phase == "data":
            own.loader.dataset.batch = _after(own.loader.dataset.batch)
        elif phase in ("python", "kernels"):
            work = (_multiply(own),) if phase == "kernels" else ()
            own.parts = replace(own.parts, forward_backward=_after(own.parts.forward_backward, *work))
        elif phase == "optimizer":
            own.optimizer.step = _after(own.optimizer.step)
        elif phase == "between":
            own.schedule = _after(own.schedule)

    with ExitStack() as stack:
        if phase == "compression":
            encode = Float16._preparers

            def slowed(self: Float16, coding: Any) -> Any:
                to, back = encode(self, coding)
                return (lambda *args: _after(to(*args))), back

            stack.enter_context(mock.patch.object(Float16, "_preparers", slowed))
        elif phase == "clipping":
            stack.enter_context(mock.patch.object(trainer, "clip_grad_norm", _after(trainer.clip_grad_norm)))
        yield change


def run_of(names: str, comm: Communicator) -> Run:
    """Return a short run's figures, as its report's file has them; with several plants between "+". Collective."""
    given: dict[str, Any] = {"eval": False}
    for name in names.split("+"):
        given.update(PLANTS[name.partition("@")[0]])
    options = TrainingOptions(data="synthetic", model="mlp", max_steps=32, quiet=True, overlap="off", **given)
    with ExitStack() as stack:
        changes = [stack.enter_context(planted(name, comm)) for name in names.split("+")]
        made = session.Session(options, comm)
        for change in changes:
            change(made)
        result = made.run()
    run = checked_run(json.loads(json.dumps(result.as_report(options, comm, made.splits.name))))
    return Run({name: value for name, value in run.items() if name != "ranks"}, run["ranks"])


def main() -> None:
    rounds, *names = sys.argv[1:]
    comm = Communicator()
    for number in range(int(rounds)):
        for name in names:
            comm.stats.reset()
            found = build(run_of(name, comm)).headline
            if comm.rank == 0:
                print(json.dumps({"round": number, "plant": name, "sentences": found}), flush=True)


if __name__ == "__main__":
    main()
