"""What a run writes down: figures of the whole, and of each rank its own stats, as numbers that merge exactly."""

from __future__ import annotations

import json
import math
import os
import resource
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from clcomm import costfile
from clcomm._version import __version__
from clcomm.buckets import Bucket
from clcomm.communicator import Communicator
from clcomm.cores import allowed_cpus
from clcomm.errors import ArgumentError, ClcommError, DataError, OutputError
from clcomm.files import write_whole
from clcomm.report.last_steps import LastSteps
from clcomm.stats import CommStats
from clcomm.trace.clocks import read_clock
from clcomm.versions import versions

FORMAT, SCHEMA = "clcomm run", 3
COMPARISON_FORMAT, COMPARISON_SCHEMA = "clcomm comparison", 1
#: In a file's name it stands for a rank's number: each rank then writes a file of its own.
RANK = "{rank}"


def gather_records(comm: Communicator, *, last_steps: LastSteps | None = None, **figures: Any) -> list[dict[str, Any]]:
    """Return all ranks' records, in rank order, on every rank: place, memory, `figures` and stats. Collective.

    last_steps: what observed this rank's steps, on every rank or on none.
    figures: this rank's own, of those in docs/reports.md: steps, training_s, data_wait_s, device_peak_bytes, ...
    """
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
        "timeline": None if last_steps is None else last_steps.texts(_clock_offset_ns(comm)),
        "stats": comm.stats.state(),
    }
    return comm.all_gather_object(own, label="report")


def _clock_offset_ns(comm: Communicator) -> int:
    """Return what to add to this rank's clock to get rank 0's, which all ranks of one host share; collective."""
    hosts = set(comm.all_gather_object(comm.host, label="report"))
    return read_clock(comm).offset_ns if len(hosts) > 1 else 0


def run_document(records: Sequence[Mapping[str, Any]], **figures: Any) -> dict[str, Any]:
    """Return a run's figures as the JSON of --report, from `gather_records`; docs/reports.md names the fields.

    figures: of the whole run: model, steps, images_per_s, layout (see `layout_of`), decisions, ...
    """
    world_size, hosts = len(records), len({record["host"] for record in records})
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "clcomm": __version__,
        "run": records[0]["run"],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "world_size": world_size,
        "hosts": hosts,
        **figures,
        "ceilings": _ceilings(world_size, hosts),
        "communication": CommStats.merged((record["stats"] for record in records), world_size).as_dict(),
        "ranks": [{name: value for name, value in record.items() if name != "run"} for record in records],
    }


def layout_of(plan: Sequence[Bucket]) -> list[list[int]]:
    """Return a bucket plan as the bytes of each bucket's tensors, or of the parts of them that it holds."""
    return [[min(bucket.stop, slot.stop) - max(bucket.start, slot.start) for slot in bucket.slots] for bucket in plan]


def _ceilings(world_size: int, hosts: int) -> list[dict[str, Any]]:
    """Return what `clcomm tune` once measured on this host for as many ranks; nothing where its file is not usable."""
    try:
        fits = costfile.load() or []
    except (ArgumentError, DataError):
        return []
    return [
        {
            "transport": each.transport,
            "sums": each.sums,
            "alpha_s": each.fit.cost.alpha_s,
            "beta_s_per_byte": each.fit.cost.beta_s_per_byte,
            "median_error": each.fit.median_error,
        }
        for each in fits
        if (each.ranks, each.hosts) == (world_size, hosts)
    ]


def write_document(path: str, document: dict[str, Any], comm: Communicator, option: str = "--report") -> None:
    """Write rank 0's document; with {rank} in the path each rank writes its own part. Collective.

    Every rank raises an error that begins with `option` when a file can't be written: ArgumentError, or OutputError
    where there is no room for it.
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


def _finite(value: Any) -> Any:
    """Return the value with null for what JSON has no number for: NaN and the infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value
