"""`clcomm tune --from FILE`: buckets, overlap, ZeRO and pipelines as predicted from a file of `clcomm bench --json`.

docs/static/predict.js computes the same for the pages of docs/try/, which a test compares.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import NamedTuple

from clcomm.base.console.output import make_console
from clcomm.base.console.table import TextColumn, TextTable
from clcomm.base.errors import ArgumentError, DataError
from clcomm.base.flat_space.layout import FlatLayout, ShardPlan
from clcomm.base.flat_space.memory import MemoryUse
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.base.schedules.pipeline import GPIPE, INTERLEAVED, ONE_F_ONE_B, pipeline_schedule
from clcomm.base.storage.field_checks import checked_fields, number, refuse_constant, whole
from clcomm.base.storage.files import read_regular
from clcomm.base.units import format_size, parse_size
from clcomm.comm.costs.forecast import Recommendation, recommend
from clcomm.comm.costs.model import Cluster, Cost
from clcomm.insight.measure.tune_report import candidates_table

_MOST_BYTES = 1 << 24
#: Of those in a file the first counts: gradients are reduced by prepared all-reduces.
_OPERATIONS = ("all_reduce_init", "all_reduce")
#: Of Adam's state, each as large as the parameters.
_BUFFERS = 2
_SCHEDULES = ((GPIPE, 1), (ONE_F_ONE_B, 1), (INTERLEAVED, 2))


class Measured(NamedTuple):
    """The cost of an all-reduce in a file, and the ranks that it was measured on."""

    cost: Cost
    ranks: int
    hosts: int

    def cluster(self, ranks: int) -> Cluster:
        """Return the cost model for so many ranks of one host; ArgumentError if the file is of several."""
        if ranks != self.ranks and self.hosts > 1:
            raise ArgumentError(f"--ranks: expected {self.ranks}, as FILE is of {self.hosts} hosts, got {ranks}")
        return Cluster({self.ranks: self.cost}, Cost(0.0, 0.0))


def read(path: str) -> Measured:
    """Return what a file of `clcomm bench --json` has of all-reduces; raises DataError for another file."""
    try:
        table = json.loads(read_regular(path, _MOST_BYTES).decode("utf-8"), parse_constant=refuse_constant)
        job = checked_fields(table, {"world_size": whole(2), "ranks_per_host": whole(1)}, "")
        fits = table.get("fits")
        found = [each for name in _OPERATIONS for each in fits if each.get("operation") == name] if fits else []
        if not found:
            raise ValueError("fits: expected one of all_reduce or all_reduce_init; measure two sizes or more")
        cost = checked_fields(found[0], {"alpha_s": number, "beta_s_per_byte": number}, "fits")
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        problem = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        raise DataError(f"{path}: {problem}; `mpiexec -n 4 clcomm bench --json {path}` writes it") from None
    return Measured(Cost(**cost), job["world_size"], -(-job["world_size"] // job["ranks_per_host"]))


def predict(tensors: Sequence[int], options: argparse.Namespace) -> int:
    """Print what a file predicts for a model's gradients and the options of `clcomm tune`."""
    measured, console = read(vars(options)["from"]), make_console(highlight=False)
    ranks = options.ranks or measured.ranks
    cluster, forward_s, backward_s = measured.cluster(ranks), options.forward_ms / 1e3, options.backward_ms / 1e3
    found = recommend(
        tensors, lambda nbytes: cluster.all_reduce_s(nbytes, ranks, 1),
        forward_s=forward_s, backward_s=backward_s, overlap=options.overlap,
    )  # fmt: skip
    console.print(candidates_table(found, f"{sum(tensors):,} bytes in {len(tensors)} tensors, {ranks} ranks"))
    console.print()
    console.print(_zero(tensors, ranks, parse_size(options.bucket_size, "--bucket-size")))
    console.print()
    console.print(_pipelines(ranks, options.micro_batches, found, forward_s, backward_s))
    return 0


def _zero(tensors: Sequence[int], ranks: int, bucket_size: int) -> TextTable:
    layout = FlatLayout(ParameterSpec(str(at), (-(-nbytes // 4),), "float32") for at, nbytes in enumerate(tensors))
    plan, rows = ShardPlan(layout, ranks, bucket_size), []
    for stage in range(4):
        use = MemoryUse.expected(plan, stage, _BUFFERS, shares=True, in_place=True)
        rows.append((str(stage), *map(format_size, use), format_size(sum(use))))
    headings = "ZeRO", "parameters", "gradients", "optimizer state", "in flight", "together"
    return TextTable([TextColumn(each) for each in headings], rows, title="A rank's memory, with Adam, on one host")


def _pipelines(ranks: int, micro_batches: int, found: Recommendation, forward_s: float, backward_s: float) -> TextTable:
    """Return the steps of pipelines whose ranks compute as long as data-parallel ones; messages take no time."""
    rows = [("data parallel", "1", "", f"{found.best.seconds * 1e3:.3f}", "")]
    for name, chunks in _SCHEDULES:
        if not forward_s > 0 < backward_s or (name == INTERLEAVED and micro_batches % ranks):
            continue
        schedule, pieces = pipeline_schedule(name, ranks, micro_batches, chunks), chunks * micro_batches
        table = schedule.timetable(lambda action: (forward_s if action.is_forward else backward_s) / pieces)  # noqa: B023
        step_s = max(turn.end for turn in table.values())
        idle, kept = f"{schedule.idle_share(table):.1%}", str(schedule.most_alive(0))
        rows.append((name, str(schedule.stages), idle, f"{step_s * 1e3:.3f}", kept))
    headings = "layers divided by", "stages", "idle", "predicted step ms", "activations kept"
    columns = [TextColumn(each, right=each != headings[0]) for each in headings]
    return TextTable(columns, rows, title=f"{ranks} ranks, micro-batches: {micro_batches}")
