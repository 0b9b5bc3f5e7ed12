"""Report and timeline of a job that only calls torch.distributed: CLCOMM_REPORT and CLCOMM_TRACE name the files.

A step ends with an optimizer's `step()`, which PyTorch reports of every optimizer; where several take turns, with that
of the first one.
"""

from __future__ import annotations

import atexit
import time

from torch.optim.optimizer import register_optimizer_step_post_hook

from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.events import Phase
from clcomm.comm.watch import endings
from clcomm.insight.report.recording import Recording


class JobRecording:
    """Records the default group's ranks until `write`, or the program's end."""

    def __init__(self, comm: Communicator, recording: Recording):
        self._comm, self._recording = comm, recording
        self._began_s, self._communicated_s = time.perf_counter(), comm.communicated()
        self._stepped = set[int]()  # the optimizers that have stepped since
        self._hook = register_optimizer_step_post_hook(self._step_finished)
        atexit.register(self._at_exit)

    @classmethod
    def wanted(cls, comm: Communicator) -> JobRecording | None:
        """Return a recording if the environment asks for one; collective."""
        recording = Recording.wanted(comm)
        return None if recording is None else cls(comm, recording)

    def _step_finished(self, optimizer: object, *_: object) -> None:
        if self._stepped and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            return
        self._stepped = {id(optimizer)}
        now_s, communicated_s = time.perf_counter(), self._comm.communicated()
        seconds = now_s - self._began_s
        within_s = min(seconds, communicated_s - self._communicated_s)
        self._comm.notify_phase(Phase("step", self._began_s, seconds, communication_s=within_s))
        self._began_s, self._communicated_s = now_s, communicated_s

    def write(self) -> None:
        self._hook.remove()
        atexit.unregister(self._at_exit)
        self._recording.write()

    def _at_exit(self) -> None:
        """Write them at the end of a program that did not call destroy_process_group, unless it failed."""
        if not endings.is_reported():
            self.write()
