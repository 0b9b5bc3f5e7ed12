"""`examples.mnist` with dying ranks: CLCOMM_TEST_KILL=RANK:PLACE:TURN:DELAY_S, such as 1:sync:20:0.001, joined by ";".

Places: "step" when a rank notes a step; "data" when it has a step's data; "forward_backward", "sync", "loss",
"optimizer", "checkpoint" and "evaluate" when the phase of that name begins; "bucket" when a bucket is reduced;
"recovery" when the rank goes on without others; "send" when ranks send a part of the state then; "report" while the
report is written; "exit" when the program has ended. A rank dies DELAY_S after its TURN-th arrival at the place.
`elastic_log.py` has what ranks write of steps and their end. PLANTED_ERROR=STEP raises on all ranks,
PLANTED_RMDIR=DIRECTORY replaces the directory by a file at step 20.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import numpy as np

from clcomm import Communicator
from clcomm.comm.stats.events import Collective, TimedPhase
from clcomm.comm.watch.endings import note_step, run
from clcomm.sync import elastic
from examples import mnist
from tests.faults import elastic_log
from tests.faults.elastic_log import at, stamp
from training import end_of_run, trainer
from training.session import Session
from training.trainer import Trainer

recovered: list[bool] = []
survivors_of, send_arrays = elastic.survivors_of, elastic.send_arrays
finish, record = Session.finish, Trainer._record
enter, notify_phase, write_document = TimedPhase.__enter__, Communicator.notify_phase, end_of_run.write_document
make_trainer = Session._make_trainer


def noted(number: int) -> None:
    """Note a step."""
    note_step(number)
    if str(number) == os.environ.get("PLANTED_ERROR"):
        raise RuntimeError("planted")
    if number == 20 and "PLANTED_RMDIR" in os.environ:
        shutil.rmtree(os.environ["PLANTED_RMDIR"], ignore_errors=True)
        open(os.environ["PLANTED_RMDIR"], "w").close()
    if recovered:
        recovered.clear()
        stamp("went on")
    at("step")


def noted_recovery(comm: Communicator) -> Communicator:
    """Find the survivors, and record the loss."""
    recovered.append(True)
    at("recovery")
    return survivors_of(comm)


def noted_send(*arguments: Any) -> dict[str, np.ndarray]:
    at("send")
    return send_arrays(*arguments)


def noted_phase(phase: TimedPhase) -> None:
    at(phase._name)
    enter(phase)


def noted_data(comm: Communicator, event: Any) -> None:
    if event.name == "data":
        at("data")
    notify_phase(comm, event)


class Buckets:
    """An observer of the buckets that are reduced."""

    def collective_finished(self, event: Collective) -> None:
        if event.bucket >= 0:
            at("bucket")


def noted_trainer(self: Session, *arguments: Any) -> Trainer:
    self.comm.add_observer(Buckets())
    return make_trainer(self, *arguments)


def noted_report(*arguments: Any) -> None:
    at("report")
    write_document(*arguments)


def noted_record(self: Trainer, *arguments: Any) -> None:
    """Write which samples the step was of, as the sampler knows them, before the step counts as done."""
    done, sampler = self.progress, self.loader.sampler
    place = {"epoch": done.epoch, "batch": done.batch, "done": getattr(sampler, "done", None)}
    elastic_log.step_done(done.step + 1, self.comm.size, **place, lr=self.optimizer.lr)
    record(self, *arguments)


def noted_finish(self: Session) -> Any:
    result = finish(self)
    elastic_log.ended(self.parts.model.state_dict())
    return result


def main() -> int:
    code = mnist.main()
    at("exit")
    if elastic_log.dies_at("exit"):
        time.sleep(1)
    return code


trainer.note_step = noted
elastic.survivors_of, elastic.send_arrays = noted_recovery, noted_send
TimedPhase.__enter__, Communicator.notify_phase = noted_phase, noted_data  # type: ignore[method-assign]
Session._make_trainer, Trainer._record, Session.finish = noted_trainer, noted_record, noted_finish  # type: ignore[method-assign]
end_of_run.write_document = noted_report
if __name__ == "__main__":
    run(main)
