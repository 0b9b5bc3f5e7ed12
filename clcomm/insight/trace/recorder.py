"""The trace of a job: an observer of events on every rank, merged into one file at the end."""

from __future__ import annotations

import logging
import os
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol

from clcomm.base.errors import ArgumentError
from clcomm.base.storage.files import FilePath, check_writable, unwritable
from clcomm.base.units import format_size, parse_size
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.events import Collective, Phase
from clcomm.insight.trace.events import LIVE_S, LiveFile
from clcomm.insight.trace.merge import LABEL, write_together
from clcomm.insight.trace.part_file import DEFAULT_LIMIT, ClockReading, PartWriter, Rows, part_path, read_clock

#: Each rank needs room for its names and a few steps.
LEAST_BYTES = 64 << 10
#: Approximate bytes in the file of a record's events: a collective's are its slice, its wait and transfer, and a
#: counter; each exposed stretch or wait within it, and the counter of each of a phase's figures, come on top.
_COLLECTIVE_BYTES, _PHASE_BYTES, _KERNEL_BYTES, _EXPOSED_BYTES, _FIGURE_BYTES = 940, 170, 175, 165, 140
#: Records are written to the part after this many bytes of events, or at the end of a step after this many seconds.
_FLUSH_BYTES, _FLUSH_S = 2 << 20, 5.0
#: Rare phases, recorded also between the steps that `every` selects.
_ALWAYS = frozenset(("epoch", "evaluate", "checkpoint"))

_log = logging.getLogger("clcomm")


class KernelSource(Protocol):
    """A log of kernels with their times, such as `clcomm.engine.timing.KernelLog`."""

    @property
    def uncertainty_ns(self) -> int: ...
    def pause(self, paused: bool) -> None: ...
    def take(self) -> list[tuple[str, tuple[int, ...], int, int]]: ...


class TimedDevice(Protocol):
    name: str

    def log_kernels(self) -> AbstractContextManager[KernelSource]: ...


class Trace:
    """Records collectives, phases and kernels on every rank of `comm`, and writes them to `path` when it is closed.

    The file is in Chrome's trace event format, for ui.perfetto.dev and chrome://tracing. Creating and closing are
    collective. Leaving a `with` block closes it; an exception leaves the ranks' parts for `clcomm trace` instead.

    Args:
        path: the file, compressed if its name ends in .gz; each rank keeps `<path>.rank<n>.part` beside it meanwhile.
        device: the device whose kernels to record; None: no kernels.
        every: one step out of this many is recorded; steps are the Communicator's phases named "step", and events
            between steps belong to the next one.
        limit: the size of the file before compression, over all ranks, in bytes or such as "16MiB"; a rank that has
            used its share stops recording and notes that in the trace.
        live: while the job runs the file has rank 0's events up to the last second, as an array without its closing
            bracket; not in one that is compressed.

    Raises:
        ArgumentError: on every rank, for an invalid argument or a file that cannot be written.
    """

    def __init__(
        self,
        comm: Communicator,
        path: FilePath,
        *,
        device: TimedDevice | None = None,
        every: int = 1,
        limit: int | str = DEFAULT_LIMIT,
        live: bool = False,
    ):
        if not isinstance(every, int) or every < 1:
            raise ArgumentError(f"every: expected a number of steps from 1 up, got {every!r}")
        self.comm, self.path, self.every = comm, Path(path), every
        self.limit_bytes = checked_limit(limit, comm.size)
        self._left_bytes = self.limit_bytes // comm.size  # of this rank's share, at the last flush
        self._room_bytes = min(_FLUSH_BYTES, self._left_bytes)  # until the next flush
        self._collectives: list[Collective] = []
        self._phases: list[Phase] = []
        self._kernels: list[tuple[str, tuple[int, ...], int, int]] = []
        self._steps, self._flushed_s = 0, time.perf_counter()
        self._is_recording = self._is_open = True
        self._stack = ExitStack()
        clock = read_clock(comm)
        self._log: KernelSource | None = None
        if device is not None:
            self._log = self._stack.enter_context(device.log_kernels())
        self._live: LiveFile | None = None
        self._part = self._open_part(device, clock if live and self.path.suffix != ".gz" else None)
        self._append(clocks=[clock])
        comm.add_observer(self)

    def _open_part(self, device: TimedDevice | None, live: ClockReading | None) -> PartWriter:
        header = {
            "job": self.comm.broadcast_object(time.time_ns(), label=LABEL),
            "rank": self.comm.rank, "name": self.comm.name, "world_size": self.comm.size, "host": os.uname().nodename,
            "device": "" if device is None else device.name, "began_ns": time.perf_counter_ns(),
            "device_uncertainty_ns": 0 if self._log is None else self._log.uncertainty_ns,
        }  # fmt: skip
        part, problem = None, None
        try:
            if self.comm.rank == 0:
                target = check_writable(self.path)
                self._live = None if live is None else LiveFile(target, header, live)
            part = PartWriter(part_path(self.path, self.comm.rank), header)
        except OSError as error:
            problem = unwritable("trace", self.path, error)
        problems = [each for each in self.comm.all_gather_object(problem, label=LABEL) if each]
        if problems or part is None:
            if part is not None:
                part.remove()
            self._stack.close()
            raise problems[0]
        return part

    # --- the observer's methods: these run within training steps ---

    def collective_finished(self, event: Collective) -> None:
        if self._is_recording:
            self._collectives.append(event)
            self._room_bytes -= _COLLECTIVE_BYTES + _EXPOSED_BYTES * (len(event.exposed) + len(event.waits))
            if self._room_bytes < 0 or self._is_stale(event.began_s + event.seconds):
                self._flush()

    def phase_finished(self, phase: Phase) -> None:
        if self._is_recording or (phase.name in _ALWAYS and self._left_bytes > 0):
            self._phases.append(phase)
            self._room_bytes -= _PHASE_BYTES + _FIGURE_BYTES * len(phase.figures)
            if self._room_bytes < 0:
                self._flush()
        if phase.name == "step":
            self._step_finished(phase.began_s + phase.seconds)

    def _step_finished(self, now_s: float) -> None:
        self._steps += 1
        if self._is_recording:
            self._take_kernels()
            if now_s - self._flushed_s > _FLUSH_S or self._is_stale(now_s):
                self._flush()
        if self.every > 1:
            self._record(self._steps % self.every == 0)

    def _is_stale(self, now_s: float) -> bool:
        return self._live is not None and now_s - self._flushed_s > LIVE_S

    def _record(self, wanted: bool) -> None:
        wanted = wanted and self._left_bytes > 0
        if wanted != self._is_recording:
            self._is_recording = wanted
            if self._log is not None:
                self._log.pause(not wanted)

    def _take_kernels(self) -> None:
        if self._log is not None:
            taken = self._log.take()
            self._kernels += taken
            self._room_bytes -= _KERNEL_BYTES * len(taken)

    def _flush(self) -> None:
        """Write the records to the part, and stop recording once this rank's share of the file is used up."""
        self._take_kernels()
        self._left_bytes -= min(_FLUSH_BYTES, self._left_bytes) - self._room_bytes
        self._room_bytes = min(_FLUSH_BYTES, max(0, self._left_bytes))
        self._flushed_s = time.perf_counter()
        self._append(kernels=self._kernels, phases=self._phases, collectives=self._collectives)
        self._kernels, self._phases, self._collectives = [], [], []
        if self._left_bytes <= 0 and self._is_recording:
            self._end_early(f"a rank's share of the limit is {format_size(self.limit_bytes // self.comm.size)}")

    def _append(self, **rows: Rows) -> None:
        try:
            self._part.append(**rows)
            if self._live is not None and "clocks" not in rows:
                self._live.append(rows)
        except OSError as error:  # a full disk must not end the training
            if self._is_recording:
                self._end_early(f"{self._part.path}: {error.strerror}")

    def _end_early(self, reason: str) -> None:
        self._left_bytes = 0
        self._record(False)
        text = f"recording ended after {self._steps} steps: {reason}"
        self._append(notes=[(time.perf_counter_ns(), text)])
        _log.warning("trace: %s", text)

    # --- the end ---

    def close(self) -> None:
        """Write the trace; collective. A second call does nothing.

        If the file cannot be written, as on a full disk, a warning is logged and the parts are kept; nothing is raised.
        """
        if not self._is_open:
            return
        self._stop()
        self._append(clocks=[read_clock(self.comm)])
        self._part.close()
        if self._live is not None:
            self._live.close()
        problem = write_together(self.comm, self._part.path, self.path, self.limit_bytes)
        if not problem:
            self._part.remove()
        elif self.comm.rank == 0:
            self._warn_unwritten(problem)

    def _stop(self) -> None:
        self._is_open = False
        self.comm.remove_observer(self)
        self._stack.close()  # after that all kernels are complete
        self._flush()

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._is_open:
            self._stop()
            self._part.close()
            if self.comm.rank == 0:
                self._warn_unwritten("the job failed")

    def _warn_unwritten(self, reason: str) -> None:
        _log.warning("trace: not written, %s; `clcomm trace %s` writes it from each rank's part", reason, self.path)


def checked_limit(limit: int | str, world_size: int) -> int:
    """Return a limit such as "16MiB" in bytes; raises ArgumentError if it is too small for this many ranks."""
    limit_bytes = parse_size(limit, "limit")
    if limit_bytes < LEAST_BYTES * world_size:
        least = format_size(LEAST_BYTES * world_size)
        raise ArgumentError(f"limit: expected at least {least} for {world_size} ranks, got {format_size(limit_bytes)}")
    return limit_bytes
