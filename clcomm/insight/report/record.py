"""Records of a run: the figures of the whole, and each rank's stats as numbers that merge exactly."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from clcomm._version import __version__
from clcomm.base.errors import ArgumentError, ClcommError, DataError, OutputError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.storage.files import write_whole
from clcomm.comm.communicator import Communicator
from clcomm.comm.costs import costfile
from clcomm.comm.costs.estimates import estimate
from clcomm.comm.stats.comm_stats import CommStats
from clcomm.comm.stats.cores import allowed_cpus
from clcomm.comm.transport.mpi_runtime import library
from clcomm.insight.report.documents import Document, Record
from clcomm.insight.report.last_steps import LastSteps
from clcomm.insight.trace.part_file import read_clock

FORMAT, SCHEMA = "clcomm run", 4
COMPARISON_FORMAT, COMPARISON_SCHEMA = "clcomm comparison", 1
#: The fields of a host's fit that a report has.
_CEILING = ("transport", "sums", "alpha_s", "beta_s_per_byte", "median_error")
#: The placeholder for the rank's number in a file's name, with which each rank writes its own file.
RANK = "{rank}"
#: Fields of a rank's record that serve the whole run.
_OF_RUN = "run", "windows"
#: Packages to report, where installed.
_DISTRIBUTIONS = ("numpy", "mpi4py", "pyopencl")


def gather_records(comm: Communicator, *, last_steps: LastSteps | None = None, **figures: Any) -> list[Record]:
    """Return all ranks' records in rank order, on every rank: host, CPUs, memory, `figures` and stats. Collective.

    Args:
        last_steps: this rank's observer of steps, given on every rank or on none.
        figures: this rank's steps, training_s, data_wait_s, device_peak_bytes, ...: see docs/reports.md. Measured
            ones replace the first three (`clcomm.comm.stats.steps`), unless their `cold` is given too.
    """
    steps = comm.stats.steps
    if steps.count and "cold" not in figures:
        cold, told_s = dict(steps.cold or {}), figures.get("data_wait_s")
        if told_s and not steps.data_wait_s:  # the caller's sum, in equal parts
            cold["data_wait_s"] = told_s * cold["steps"] / steps.count
        figures |= {**steps.sums(), "data_wait_s": steps.data_wait_s or told_s, "cold": cold}
    own = {
        "run": uuid.uuid4().hex,
        "rank": comm.rank,
        "host": comm.host,
        "host_name": os.uname().nodename,
        "cpus": allowed_cpus(),
        "sums": comm.sums,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": versions(),
        **figures,
        "windows": steps.windows(),
        "timeline": None if last_steps is None else last_steps.texts(_clock_offset_ns(comm)),
        "stats": comm.stats.state(),
    }
    return comm.all_gather_object(own, label="report")


def _clock_offset_ns(comm: Communicator) -> int:
    """Return the offset of rank 0's clock from this rank's; 0 on one host, whose ranks share a clock. Collective."""
    hosts = set(comm.all_gather_object(comm.host, label="report"))
    return read_clock(comm).offset_ns if len(hosts) > 1 else 0


def run_document(records: Sequence[Record], **figures: object) -> Document:
    """Return the JSON of --report, given the records of `gather_records`; docs/reports.md names the fields.

    `figures` are those of the whole run: model, steps, images_per_s, layout (see `layout_of`), decisions, ...
    """
    world_size, hosts = len(records), len({record["host"] for record in records})
    windows = {name: estimate(each).as_dict() for name, each in records[0].get("windows", {}).items() if each}
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "clcomm": __version__,
        "run": records[0]["run"],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "world_size": world_size,
        "hosts": hosts,
        "steps": records[0].get("steps"),
        "intervals": windows or None,
        **figures,
        "ceilings": _ceilings(world_size, hosts),
        "communication": CommStats.merged((record["stats"] for record in records), world_size).as_dict(),
        "ranks": [{name: value for name, value in record.items() if name not in _OF_RUN} for record in records],
    }


def layout_of(plan: Sequence[Bucket]) -> list[list[int]]:
    """Return the bytes of each bucket's tensors, or of its parts of them."""
    return [
        [min(bucket.stop, place.stop) - max(bucket.start, place.start) for place in bucket.ranges] for bucket in plan
    ]


def _ceilings(world_size: int, hosts: int) -> list[Record]:
    """Return the costs measured by `clcomm tune` for as many ranks here; [] if its file is missing or invalid."""
    try:
        fits = costfile.load() or []
    except (ArgumentError, DataError):
        return []
    own = [each for each in fits if (each.ranks, each.hosts) == (world_size, hosts)]
    return [costfile.as_dict(each, _CEILING) for each in own]


def write_document(path: str, document: Document, comm: Communicator, option: str = "--report") -> None:
    """Write rank 0's document; with {rank} in the path each rank writes its own part. Collective.

    Raises:
        ArgumentError: on every rank, if a file cannot be written; the message starts with `option`.
        OutputError: the same, for lack of room.
    """
    apart = RANK in path and "ranks" in document
    if apart:
        document = comm.broadcast_object(document, label="report")
        document["ranks"] = [record for record in document["ranks"] if record["rank"] == comm.rank]
    problem: ClcommError | None = None
    if apart or comm.rank == 0:
        try:
            text = json.dumps(_finite(document), indent=1, allow_nan=False)
            write_whole(path.replace(RANK, str(comm.rank)), text + "\n", option)
        except (ArgumentError, OutputError) as error:
            problem = error
    problems = [each for each in comm.all_gather_object(problem, label="report") if each]
    if problems:
        raise problems[0]


def _finite(value: object) -> object:
    """Return the value with None for NaN and the infinities, which JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def versions() -> dict[str, str]:
    """Return the versions of clcomm, Python, the MPI library, and the packages that are installed."""
    found = {"clcomm": __version__, "Python": platform.python_version(), "MPI": library()}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):  # PyOpenCL is an extra
            found[name] = metadata.version(name)
    return found
