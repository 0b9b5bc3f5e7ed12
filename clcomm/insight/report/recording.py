"""Reports and timelines without code in the program: environment variables name the files."""

from __future__ import annotations

import os

from clcomm.base.host import variables
from clcomm.comm.communicator import Communicator
from clcomm.insight.report.record import RANK, gather_records, run_document, write_document
from clcomm.insight.trace import Trace
from clcomm.jobs.checkpoint.output_files import check_writable

REPORT, TIMELINE = "CLCOMM_REPORT", "CLCOMM_TRACE"


class Recording:
    """Writes a report and a timeline.

    Args:
        comm: the ranks.
        report: the file for `clcomm report`; "": none.
        live: whether timelines can be read while the job runs; see `Trace`.
    """

    def __init__(self, comm: Communicator, report: str, *, live: bool = False):
        self._comm, self._report, self._live = comm, report, live
        self._trace: Trace | None = None

    @classmethod
    def wanted(cls, comm: Communicator, *others: str) -> Recording | None:
        """Return a recording where rank 0's environment asks for one; collective.

        others: variables that name the timeline's file besides CLCOMM_TRACE, or Horovod's word "DYNAMIC" for one that
            the program begins later; with any, timelines can be read while the job runs.

        Raises ArgumentError on every rank where a file could not be written.
        """
        named = [os.environ.get(name, "") for name in others]
        asked = (
            variables.text(REPORT),
            variables.text(TIMELINE) or next((each for each in named if each not in ("", "DYNAMIC")), ""),
        )
        report, timeline = comm.broadcast_object(asked)
        if not report and not timeline:
            return None
        if report:
            own, whole = (report.replace(RANK, str(comm.rank)), None) if RANK in report else (None, report)
            check_writable(comm, {REPORT: whole}, of_each_rank={REPORT: own})
        recording = cls(comm, report, live=bool(others))
        if timeline:
            recording.start_trace(timeline)
        return recording

    def start_trace(self, path: str) -> None:
        """Begin a timeline; collective."""
        if self._trace is None:
            self._trace = Trace(self._comm, path, live=self._live)

    def stop_trace(self) -> None:
        """Write the timeline; collective."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    def write(self) -> None:
        """Write the requested files; collective."""
        self.stop_trace()
        if self._report:
            document = run_document(gather_records(self._comm), engine="torch", bucket_size=self._comm.bucket_size)
            write_document(self._report, document, self._comm, REPORT)
            self._report = ""
