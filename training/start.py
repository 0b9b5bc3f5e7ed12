"""The start of a job: its ranks join, and its files are checked before data is read and kernels are built."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from clcomm.comm.collectives.same_start import declare
from clcomm.comm.communicator import Communicator
from clcomm.insight.report.record import RANK
from clcomm.insight.trace.part_file import part_path
from clcomm.jobs.checkpoint.outputs import check_writable
from clcomm.sync import elastic
from training.logging_setup import configure_logging
from training.options import JobOptions, TrainingOptions


def start(options: TrainingOptions) -> Communicator:
    """Return the Communicator of a training run, with log records sent to stderr; collective.

    Raises, on every rank, MismatchError if ranks have different options, ArgumentError if a file can't be written,
    LaunchError if MPI does not support --elastic.
    """
    comm = join_ranks(options)
    check_output_files(options, comm)
    if options.elastic:
        elastic.require_support()
    configure_logging(comm.rank, comm.size, options.quiet)
    return comm


def join_ranks(options: JobOptions) -> Communicator:
    """Return a Communicator of the job's ranks; raises MismatchError, on every rank, if their options differ."""
    declare(os.path.basename(sys.argv[0]), options)
    return Communicator(
        bucket_size=options.bucket_size, use_bucketing=not options.no_bucketing, transport=options.transport
    )


def check_output_files(
    options: TrainingOptions, comm: Communicator, also: Mapping[str, str | None] | None = None
) -> None:
    """Raise ArgumentError on every rank unless all files that options name can be written; collective.

    `also` has further files by option.
    """
    written = {"--checkpoint": options.checkpoint, "--report": options.report, **(also or {}), "--trace": options.trace}
    each_rank = {}
    if options.trace:
        each_rank["--trace"] = str(part_path(Path(options.trace), comm.rank))
    if options.report and RANK in options.report:
        each_rank["--report"] = options.report.replace(RANK, str(comm.rank))
        written.pop("--report")
    directories = {
        "--tensorboard": options.tensorboard, "--metrics-textfile": options.metrics_textfile,
        "--wandb": options.wandb,
    }  # fmt: skip
    check_writable(
        comm, written, in_place={"--log-csv": options.log_csv}, directories=directories,
        of_each_rank=each_rank,
    )  # fmt: skip
