"""`clcomm tune`: measures all-reduces, fits the cost model, and says what follows for a model's gradients.

Groups of 2, 4, ... ranks of one host are measured, one rank a host where there are several, and the whole job; each
group's cost is fitted, and its sum over the recommended buckets is measured once more, as evidence. Ranks outside
a group sleep meanwhile. How calls are timed stands in clcomm/measure.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from clcomm import costfile, forecast
from clcomm.bench import MOST_FACTOR, add_schedule, schedule_of
from clcomm.collective_cases import PreparedAllReduce
from clcomm.communicator import Communicator
from clcomm.costmodel import ALGORITHMS, Cluster, Cost, Measured, cluster_of, fit
from clcomm.errors import ArgumentError
from clcomm.forecast import MODELS, Recommendation, equal_tensors
from clcomm.host_memory import require_memory
from clcomm.measure import Lane, Schedule, sizes_between, time_calls
from clcomm.option_types import number, whole_number
from clcomm.sums import add_sums, agreed_fold
from clcomm.transport.mpi import host_of
from clcomm.transport.reduction import Fold
from clcomm.units import parse_size

_IDLE_S = 0.005
#: More tensors than any model has, and how many arrays of its size a measured case holds, at the most.
MOST_TENSORS, _ARRAYS = 10**5, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `clcomm tune`."""
    add = parser.add_argument
    add("--model", choices=MODELS, default="convnet", help="whose gradients; default: %(default)s")
    add("--bytes", metavar="SIZE", help="gradients of so many bytes in all, instead of --model's")
    add(
        "--tensors",
        type=whole_number(1, MOST_TENSORS),
        metavar="COUNT",
        help="tensors of equal size that make up --bytes; default: 1",
    )
    add("--min", default="1KiB", metavar="SIZE", help="smallest size measured; default: %(default)s")
    add("--max", default="4MiB", metavar="SIZE", help="largest; default: %(default)s")
    add(
        "--factor",
        type=number(1, above=True, most=MOST_FACTOR),
        default=4.0,
        help="from one size to the next; default: %(default)g",
    )
    add_sums(parser)
    add_schedule(parser)
    add("--forward-ms", type=number(), default=0.0, help="a step's forward, update and the like, for step times")
    add("--backward-ms", type=number(), default=0.0, help="a step's backward")
    add("--overlap", action="store_true", help="predict buckets that are reduced while backward goes on")
    add("--ranks-per-host", type=whole_number(1), metavar="COUNT", help="in the scaling table; default: as in this job")
    add("--algorithm", choices=ALGORITHMS, default="ring",
        help="between hosts; default: %(default)s, as clcomm has it")  # fmt: skip
    add("--link-us", type=number(above=True), help="a message's latency between hosts, instead of the measured one")
    add("--link-gb-s", type=number(above=True), help="bandwidth between hosts in 10^9 bytes a second, likewise")
    add("--no-store", action="store_true", help="do not keep the fits")


@dataclass(frozen=True)
class Result:
    """All that was found, the same on every rank.

    measured_s: seconds of the recommended plan by (ranks, hosts). sums: what added up in shared memory, "device" or
    "numpy".
    """

    fits: tuple[Measured, ...]
    cluster: Cluster
    link_from: str
    tensors: tuple[int, ...]
    recommendation: Recommendation
    measured_s: dict[tuple[int, int], float]
    sums: str


def run(options: argparse.Namespace) -> int:
    """Measure, fit, print on rank 0, and keep the fits on each host; collective."""
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
            from clcomm.tune_report import show  # here, because one rank needs it

            show(result, ranks_per_host, options, stored)
    return 0


def tensors_of(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the tensors' bytes, in the model's order, that the options describe."""
    if options.bytes is None:
        if options.tensors is not None:
            raise ArgumentError("--tensors: needs --bytes SIZE to say how large they are in all")
        return MODELS[options.model]
    return equal_tensors(parse_size(options.bytes, "--bytes"), 1 if options.tensors is None else options.tensors)


def _sizes(options: argparse.Namespace) -> list[int]:
    sizes = sizes_between(parse_size(options.min, "--min"), parse_size(options.max, "--max"), options.factor)
    if len(sizes) < 2:
        raise ArgumentError("--max: expected room for two sizes or more, to fit a latency and a bandwidth")
    return sizes


def tune(
    control: Communicator, tensors: Sequence[int], sizes: Sequence[int], schedule: Schedule, options: argparse.Namespace
) -> Result:
    """Measure the groups, fit, recommend, and measure the recommended plan; collective, the same on every rank."""
    fold = agreed_fold(control, options.sums)
    groups = _groups(control, fold)
    fits = [found for group in groups for found in _agreed(control, group, lambda g: _fits(g, sizes, schedule))]
    cluster, link_from = chosen_cluster(fits, options)
    ranks, hosts = control.size, _hosts(control)
    recommendation = forecast.recommend(
        tensors, lambda nbytes: cluster.all_reduce_s(nbytes, ranks, hosts),
        forward_s=options.forward_ms / 1e3, backward_s=options.backward_ms / 1e3, overlap=options.overlap,
    )  # fmt: skip
    plan = recommendation.best.buckets
    measured_s = {
        (group.ranks, group.hosts): _agreed(control, group, lambda g: _plan_s(g, plan, schedule)) for group in groups
    }
    for group in groups:
        group.close()
    sums = "numpy" if fold is None else "device"
    return Result(tuple(fits), cluster, link_from, tuple(tensors), recommendation, measured_s, sums)


def chosen_cluster(fits: Sequence[Measured], options: argparse.Namespace) -> tuple[Cluster, str]:
    """Return the cost model of hosts like these, with the options' link where they name one, and where it is from."""
    cluster, source = cluster_of(fits, options.algorithm)
    link = cluster.link
    if options.link_us is not None or options.link_gb_s is not None:
        link = Cost(
            link.alpha_s if options.link_us is None else options.link_us / 1e6,
            link.beta_s_per_byte if options.link_gb_s is None else 1e-9 / options.link_gb_s,
        )
        source = "as the options say"
    return replace(cluster, link=link), source


# --- groups of ranks ---------------------------------------------------------------------------------------------


@dataclass
class Group:
    """Some of the job's ranks; `lanes` and `control` are there on its members alone."""

    ranks: int
    hosts: int
    comm: Any
    control: Communicator | None
    lanes: list[Lane] = field(default_factory=list)

    def close(self) -> None:
        """Free its communicators; collective over all ranks of the job."""
        if self.control is not None:
            for lane in self.lanes:
                lane.comm.finalize()
            self.control.finalize()
        self.comm.Free()


def _groups(control: Communicator, fold: Fold | None) -> list[Group]:
    """Return the groups to measure, the same list on every rank; rank 0 is in all of them. fold: as a Lane's."""
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
) -> Group:
    comm = control.comm.Split(0 if member else 1, control.rank)
    if not member:
        return Group(ranks, hosts, comm, None)
    lanes = [Lane(name, comm, fold) for name in transports]
    return Group(ranks, hosts, comm, Communicator(comm, transport="mpi"), lanes)


def _agreed(control: Communicator, group: Group, work: Any) -> Any:
    """Return what `work` returns on the group's members; the other ranks sleep, so as to leave them the cores."""
    result = None if group.control is None else work(group)
    done = control.comm.Ibarrier()
    while not done.Test():
        time.sleep(_IDLE_S if group.control is None else 0)
    return control.broadcast_object(result)


def _fits(group: Group, sizes: Sequence[int], schedule: Schedule) -> list[Measured]:
    """Return a fit for each transport that the group really has, named as what moved the data."""
    assert group.control is not None
    points: dict[str, list[tuple[int, float]]] = {}
    for nbytes in sizes:
        cases = [PreparedAllReduce(lane.comm, nbytes) for lane in group.lanes]
        medians = np.median(time_calls(cases, group.control, schedule), axis=1)
        for lane, case, seconds in zip(group.lanes, cases, medians, strict=True):
            if lane.name in ("auto", lane.moved_by):  # else shared memory had no room, and the same is in there twice
                points.setdefault(lane.name, []).append((case.nbytes, float(seconds)))
    return [
        Measured(lane.moved_by, group.ranks, group.hosts, fit(points[lane.name]), lane.comm.sums)
        for lane in group.lanes
        if lane.name in points and (lane.name != "auto" or lane.moved_by == "hierarchical")
    ]


def _plan_s(group: Group, plan: Sequence[int], schedule: Schedule) -> float:
    """Return the median time of a plan's all-reduces in a row, by the first of the group's transports."""
    assert group.control is not None
    case = Plan([PreparedAllReduce(group.lanes[0].comm, nbytes) for nbytes in plan])
    return float(np.median(time_calls([case], group.control, schedule)))


class Plan:
    """Several prepared all-reduces that are timed as one."""

    def __init__(self, cases: Sequence[PreparedAllReduce]):
        self.cases = cases

    def once(self) -> None:
        """Do them all, in order."""
        for case in self.cases:
            case.once()
