"""`clcomm tune`: measures all-reduces, fits the cost model, and recommends a bucket size for a model's gradients.

Groups of 2, 4, ... ranks of one host are measured, and with several hosts also one rank a host and the whole job. Each
group's cost is fitted, and the recommended buckets are then measured to confirm the prediction. Ranks outside a group
sleep meanwhile. clcomm/insight/measure/timing.py describes how calls are timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from clcomm.base.console.option_types import number, whole_number
from clcomm.base.errors import ArgumentError
from clcomm.base.host import require_memory
from clcomm.base.units import parse_size
from clcomm.comm.communicator import Communicator
from clcomm.comm.costs import costfile, forecast
from clcomm.comm.costs.forecast import MODELS, equal_tensors
from clcomm.comm.costs.model import ALGORITHMS, Cluster, Cost, MeasuredFit, cluster_of, fit
from clcomm.comm.transport.mpi_communicators import host_of
from clcomm.comm.transport.reduction import Fold
from clcomm.insight.measure.bench import add_schedule, add_sizes, schedule_of
from clcomm.insight.measure.collective_cases import PreparedAllReduceCase
from clcomm.insight.measure.timing import (
    MeasuredTransport,
    TimingSchedule,
    add_sums_option,
    agreed_fold,
    sizes_between,
    time_calls,
)
from clcomm.insight.measure.tune_report import TuneResult, show
from clcomm.insight.measure.what_if import predict

if TYPE_CHECKING:
    from clcomm.comm.transport.mpi_runtime import Intracomm

T = TypeVar("T")

_IDLE_S = 0.005
#: More tensors than any model has, and the most arrays of its size that a measured case holds.
MOST_TENSORS, _ARRAYS = 10**5, 2
#: Of a pipeline that is drawn up action by action.
MOST_RANKS, MOST_MICRO_BATCHES = 64, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=MODELS, default="convnet", help="tune for its gradients; default: %(default)s")
    add("--bytes", metavar="SIZE", help="gradients of this size in total, instead of --model's")
    add(
        "--tensors",
        type=whole_number(1, MOST_TENSORS),
        metavar="COUNT",
        help="number of equal tensors in --bytes; default: 1",
    )
    add_sizes(parser, "1KiB", "4MiB")
    add_sums_option(parser)
    add_schedule(parser)
    add("--forward-ms", type=number(), default=0.0, help="a step's time besides backward and all-reduces")
    add("--backward-ms", type=number(), default=0.0, help="a step's backward time")
    add("--overlap", action="store_true", help="predict with buckets reduced during backward")
    add("--ranks-per-host", type=whole_number(1), metavar="COUNT", help="in the scaling table; default: as in this job")
    add("--algorithm", choices=ALGORITHMS, default="ring",
        help="of the all-reduce between hosts; default: %(default)s, which clcomm uses")  # fmt: skip
    add("--link-us", type=number(above=True), help="a message's latency between hosts, instead of the measured one")
    add("--link-gb-s", type=number(above=True), help="bandwidth between hosts in 10^9 bytes a second, likewise")
    add("--no-store", action="store_true", help="do not keep the fits")
    add("--from", metavar="FILE",
        help="measure nothing: predict from this file of clcomm bench --json, with ZeRO and pipelines")  # fmt: skip
    add("--ranks", type=whole_number(1, MOST_RANKS), help="with --from: predict for so many; default: the file's")
    add("--bucket-size", metavar="SIZE", default="1MiB", help="with --from: of ZeRO's units; default: %(default)s")
    add("--micro-batches", type=whole_number(1, MOST_MICRO_BATCHES), default=8, metavar="COUNT",
        help="with --from: of pipelines; default: %(default)s")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure, fit, print on rank 0, and store the fits on each host; collective."""
    if vars(options)["from"] is not None:  # a word of Python
        return predict(tensors_of(options), options)
    tensors, schedule, sizes = tensors_of(options), schedule_of(options), _sizes(options)
    with Communicator(transport="mpi") as control:
        if control.size < 2:
            raise ArgumentError("ranks: expected 2 or more, got 1; start it as mpiexec -n 4 clcomm tune")
        for name, value, nbytes in (("--max", options.max, sizes[-1]), ("--bytes", options.bytes, sum(tensors))):
            require_memory(name, value, _ARRAYS * nbytes, control.local_size)
        result = tune(control, tensors, sizes, schedule, options)
        keeps = not options.no_store and control.local_rank == 0
        stored = costfile.store(result.fits) if keeps else None
        ranks_per_host = options.ranks_per_host or control.local_size
        if control.rank == 0:
            show(result, ranks_per_host, options, stored)
    return 0


def tensors_of(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the bytes of each tensor described by the options, in the model's order."""
    if options.bytes is None:
        if options.tensors is not None:
            raise ArgumentError("--tensors: needs --bytes SIZE, their total size")
        return MODELS[options.model]
    return equal_tensors(parse_size(options.bytes, "--bytes"), 1 if options.tensors is None else options.tensors)


def _sizes(options: argparse.Namespace) -> list[int]:
    sizes = sizes_between(parse_size(options.min, "--min"), parse_size(options.max, "--max"), options.factor)
    if len(sizes) < 2:
        raise ArgumentError("--max: expected room for two sizes or more, to fit a latency and a bandwidth")
    return sizes


def tune(
    control: Communicator,
    tensors: Sequence[int],
    sizes: Sequence[int],
    schedule: TimingSchedule,
    options: argparse.Namespace,
) -> TuneResult:
    """Measure the groups, fit, recommend, and measure the recommended plan; collective, the same on every rank."""
    fold = agreed_fold(control, options.sums)
    groups = _groups(control, fold)
    fits = [found for group in groups for found in _run_on(group, control, lambda g: _fits(g, sizes, schedule))]
    cluster, link_from = chosen_cluster(fits, options)
    ranks, hosts = control.size, _hosts(control)
    recommendation = forecast.recommend(
        tensors, lambda nbytes: cluster.all_reduce_s(nbytes, ranks, hosts),
        forward_s=options.forward_ms / 1e3, backward_s=options.backward_ms / 1e3, overlap=options.overlap,
    )  # fmt: skip
    plan = recommendation.best.buckets
    measured_s = {
        (group.ranks, group.hosts): _run_on(group, control, lambda g: _plan_s(g, plan, schedule)) for group in groups
    }
    for group in groups:
        group.close()
    sums = "numpy" if fold is None else "device"
    return TuneResult(tuple(fits), cluster, link_from, tuple(tensors), recommendation, measured_s, sums)


def chosen_cluster(fits: Sequence[MeasuredFit], options: argparse.Namespace) -> tuple[Cluster, str]:
    """Return the cost model, its link replaced by --link-us and --link-gb-s where given, and the link's source."""
    cluster, source = cluster_of(fits, options.algorithm)
    link = cluster.link
    if options.link_us is not None or options.link_gb_s is not None:
        link = Cost(
            link.alpha_s if options.link_us is None else options.link_us / 1e6,
            link.beta_s_per_byte if options.link_gb_s is None else 1e-9 / options.link_gb_s,
        )
        source = "from the options"
    return replace(cluster, link=link), source


# --- groups of ranks ---------------------------------------------------------------------------------------------


@dataclass
class RankGroup:
    """Some of the job's ranks; only its members have `targets` and `control`."""

    ranks: int
    hosts: int
    comm: Intracomm
    control: Communicator | None
    targets: list[MeasuredTransport] = field(default_factory=list)

    def close(self) -> None:
        """Free the communicators; collective over all ranks of the job."""
        if self.control is not None:
            for target in self.targets:
                target.comm.finalize()
            self.control.finalize()
        self.comm.Free()


def _groups(control: Communicator, fold: Fold | None) -> list[RankGroup]:
    """Return the groups to measure, the same list on every rank; rank 0 is in all of them."""
    host = host_of(control.comm)
    first = host.bcast(control.rank, 0)
    host.Free()
    local_size, hosts = control.broadcast_object(control.local_size), _hosts(control)
    counts = sorted({1 << exponent for exponent in range(1, local_size.bit_length())} | {local_size} - {1})
    group = partial(_group, control, fold)
    groups = [group(n, 1, first == 0 and control.local_rank < n, ("shared", "mpi")) for n in counts]
    if hosts > 1:
        groups.append(group(hosts, hosts, control.local_rank == 0, ("mpi",)))
        if hosts < control.size:
            groups.append(group(control.size, hosts, True, ("auto",)))
    return groups


def _hosts(control: Communicator) -> int:
    return control.all_gather_object(control.local_rank).count(0)


def _group(
    control: Communicator, fold: Fold | None, ranks: int, hosts: int, member: bool, transports: Sequence[str]
) -> RankGroup:
    comm = control.comm.Split(0 if member else 1, control.rank)
    if not member:
        return RankGroup(ranks, hosts, comm, None)
    targets = [MeasuredTransport(name, comm, fold) for name in transports]
    return RankGroup(ranks, hosts, comm, Communicator(comm, transport="mpi"), targets)


def _run_on(group: RankGroup, control: Communicator, work: Callable[[RankGroup], T]) -> T:
    """Run `work` on the group's members and return its result on every rank; other ranks sleep to free their cores."""
    result = None if group.control is None else work(group)
    done = control.comm.Ibarrier()
    while not done.Test():
        time.sleep(_IDLE_S if group.control is None else 0)
    found: T = control.broadcast_object(result)
    return found


def _fits(group: RankGroup, sizes: Sequence[int], schedule: TimingSchedule) -> list[MeasuredFit]:
    """Return a fit for each transport that the group could use, named after the transport that moved the data."""
    assert group.control is not None
    points: dict[str, list[tuple[int, float]]] = {}
    for nbytes in sizes:
        cases = [PreparedAllReduceCase(target.comm, nbytes) for target in group.targets]
        medians = np.median(time_calls(cases, group.control, schedule), axis=1)
        for target, case, seconds in zip(group.targets, cases, medians, strict=True):
            if target.name in ("auto", target.moved_by):  # else "shared" had no room and would repeat "mpi"
                points.setdefault(target.name, []).append((case.nbytes, float(seconds)))
    return [
        MeasuredFit(target.moved_by, group.ranks, group.hosts, fit(points[target.name]), target.comm.sums)
        for target in group.targets
        if target.name in points and (target.name != "auto" or target.moved_by == "hierarchical")
    ]


def _plan_s(group: RankGroup, plan: Sequence[int], schedule: TimingSchedule) -> float:
    """Return the median seconds of a plan's consecutive all-reduces on the group's first transport."""
    assert group.control is not None
    case = ConsecutiveAllReduces([PreparedAllReduceCase(group.targets[0].comm, nbytes) for nbytes in plan])
    return float(np.median(time_calls([case], group.control, schedule)))


class ConsecutiveAllReduces:
    """Several prepared all-reduces, timed together."""

    def __init__(self, cases: Sequence[PreparedAllReduceCase]):
        self.cases = cases

    def once(self) -> None:
        for case in self.cases:
            case.once()
