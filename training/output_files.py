"""The files that a job's options name: all of them are looked at before data is read and kernels are built."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from clcomm.communicator import Communicator
from clcomm.outputs import check_writable
from clcomm.report.record import RANK
from clcomm.trace.part import part_path


def check_output_files(options: Namespace, comm: Communicator) -> None:
    """Raise ArgumentError on every rank unless every file that the options name can be written; collective."""

    def given(*names: str) -> dict[str, str | None]:
        return {f"--{name.replace('_', '-')}": getattr(options, name, None) for name in names}

    written, each_rank = given("checkpoint", "report", "plot", "trace"), {}
    if getattr(options, "trace", None):
        each_rank["--trace"] = str(part_path(Path(options.trace), comm.rank))
    if RANK in (options.report or ""):
        each_rank["--report"] = options.report.replace(RANK, str(comm.rank))
        written.pop("--report")
    check_writable(comm, written, in_place=given("log_csv"), directories=given("tensorboard"), of_each_rank=each_rank)
