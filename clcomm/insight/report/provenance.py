"""A run's provenance, for repeating or comparing it: model, settings, machine and versions."""

from __future__ import annotations

import math
from collections.abc import Iterable

from clcomm.base.units import format_size
from clcomm.comm.stats.cores import parse_cpus
from clcomm.insight.report.documents import Record
from clcomm.insight.report.elements import Column, Table, count
from clcomm.insight.report.reading import Run
from clcomm.sync.synchronizer import GRADIENTS, PARAMETERS

#: Entries that have to be equal for two runs' times to be comparable: those on the machine and the software.
MACHINE = ("hosts", "cores", "device", "driver", "MPI", "Python", "numpy", "mpi4py", "pyopencl")


def provenance_table(run: Run) -> Table:
    rows = [{"what": what, "value": value} for what, value in provenance(run).items() if value]
    return Table("provenance", "What ran, and where", [Column("what", "", "text"), Column("value", "", "text")], rows)


def subtitle(run: Run) -> str:
    """Return the most important entries as one line, for a report's subtitle."""
    found = provenance(run)
    names = ("batch", "bucket size", "transport", "device", "cores", "hosts", "MPI", "date")
    prefixes = {"batch": "batch", "bucket size": "buckets of", "transport": "transport"}
    parts = [f"{prefixes[name]} {found[name]}" if name in prefixes else found[name] for name in names if found[name]]
    return " · ".join(parts).replace("buckets of none", "no buckets")


def line(run: Run) -> str:
    unnamed = ("model", "device", "driver", "cores", "date")
    return "; ".join(text if name in unnamed else f"{name} {text}" for name, text in provenance(run).items() if text)


def provenance(run: Run) -> dict[str, str]:
    """Return the entries as text by name; "" where the file lacks one."""
    figures, ranks = run.figures, run.ranks
    versions = [record["versions"] or {} for record in ranks]
    names = dict.fromkeys(name for each in versions for name in each)
    return {
        "model": figures["model"] or "",
        "data": figures["dataset"] or "",
        "engine": figures["engine"] or "",
        "batch": _batch(run),
        "bucket size": _bucket_size(run),
        "transport": _transport(run),
        "training loss": "" if figures["train_loss"] is None else f"{figures['train_loss']:.4f}",
        "date": (figures["date"] or "").replace("T", " ").replace("+00:00", " UTC"),
        "ranks": str(run.world_size),
        "hosts": _distinct(record["host_name"] for record in ranks),
        "cores": _cores(ranks),
        "device": _distinct(record["device"] for record in ranks),
        "driver": _distinct(record["driver"] for record in ranks),
        "clcomm": figures["clcomm"] or "",
        **{name: _distinct(each.get(name) for each in versions) for name in names if name != "clcomm"},
        **{name: "" for name in MACHINE if name not in (*names, "hosts", "cores", "device", "driver")},
    }


def _batch(run: Run) -> str:
    size, parts = run.figures["batch_size"], run.figures["grad_accumulation"] or 1
    if not size:
        return ""
    micro = f" in {parts} micro-batches of {size}" if parts > 1 else ""
    shards = _logical_shards(run)
    if shards:
        return f"{size * parts:,} for each of {shards} shards{micro}, {size * parts * shards:,} in all"
    together = _divided(run)
    own = "a rank" if together == 1 else f"for {together} ranks together"
    return f"{size * parts:,} {own}{micro}, {size * parts * run.world_size // together:,} in all"


def _divided(run: Run) -> int:
    """Return how many ranks divide a model, and have the same batches."""
    given = [str((run.figures["settings"] or {}).get(name)) for name in ("tp", "pp")]
    return math.prod(int(each) or 1 for each in given if each.isdecimal())


def _logical_shards(run: Run) -> int:
    """Return the number of a step's logical shards, 0 without any."""
    given = str((run.figures["settings"] or {}).get("logical_shards"))
    return int(given) if given.isdecimal() else 0


def _bucket_size(run: Run) -> str:
    settings = run.figures["settings"] or {}
    stage = settings.get("zero", "0")
    if _logical_shards(run) not in (0, run.world_size):
        return "none, the mean over shards has one sum"
    if stage == "1" or (stage == "0" and settings.get("sharded_optimizer") == "True"):
        return "none, a sharded update reduces all gradients at once"
    if run.figures["bucket_size"] is None:
        return "none, each tensor on its own" if settings else ""
    asked = settings.get("bucket_size")
    return format_size(run.figures["bucket_size"]) + (" (auto)" if asked == "auto" else "")


def _transport(run: Run) -> str:
    stats = run.stats()
    totals = [stats.total(*key) for key in (("all_reduce", GRADIENTS), ("reduce_scatter", GRADIENTS),
                                            ("all_gather", PARAMETERS))]  # fmt: skip
    return _distinct(total["transport"] for total in totals if total["calls"])


def _cores(ranks: list[Record]) -> str:
    """Return the number of cores that each host's ranks may use together."""
    hosts: dict[object, set[int]] = {}
    for record in ranks:
        if record["cpus"]:
            hosts.setdefault(record["host"], set()).update(parse_cpus(record["cpus"]))
    return _distinct(count(len(cpus), "core") for cpus in hosts.values())


def _distinct(values: Iterable[str | None]) -> str:
    return ", ".join(dict.fromkeys(value for value in values if value))
