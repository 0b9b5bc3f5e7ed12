"""Forecasts of a training's step on jobs of other sizes, from what a rank computes and what links carry.

A rank's batch stays as it is (weak scaling), and so does what it computes in a step. No rank is slower than another:
waits for stragglers come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.costs.forecast import Candidate, recommend
from clcomm.comm.costs.model import Cluster, Cost, plan_s, step_s, terms

#: How gradients are reduced: clcomm's own, within hosts and by a ring between them; or among all ranks alike, by the
#: faster of recursive doubling and halving, as MPI libraries choose, or by a ring.
HIERARCHICAL, PLAIN, RING = WAYS = "hierarchical", "plain", "ring"
#: What is communicated: gradients in each step, ZeRO's stage 3, or parameters every so many steps.
EACH_STEP, ZERO3, SELDOM = "dp", "zero3", "seldom"


@dataclass(frozen=True)
class Workload:
    """A rank's mean step.

    Attributes:
        tensors: bytes of each gradient, in the model's order.
        buckets: bytes of each, in the order in which backward completes them.
        forward_s, backward_s, other_s: seconds, without communication and waits.
        overlap: whether buckets are reduced during backward.
    """

    tensors: tuple[int, ...]
    buckets: tuple[int, ...]
    forward_s: float
    backward_s: float
    other_s: float
    overlap: bool = False

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.other_s


class Strategy(NamedTuple):
    """What is communicated; `every`: steps from one exchange of the parameters to the next, where it is SELDOM."""

    kind: str = EACH_STEP
    every: int = 1


class Job(NamedTuple):
    """Equal hosts."""

    hosts: int
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


class JobForecast(NamedTuple):
    """A mean step of a job.

    Attributes:
        communication_s, exposed_s: seconds of collectives, and those of them that keep a rank from computing.
        sent_nbytes: that a rank sends in messages; what ranks of a host read in common memory is not sent.
        best: the fastest bucket size; None where there are no buckets, or other sizes' times are not known.
    """

    way: str
    job: Job
    step_s: float
    communication_s: float
    exposed_s: float
    sent_nbytes: float
    best: Candidate | None


def forecast(work: Workload, cluster: Cluster, job: Job, way: str, strategy: Strategy = Strategy()) -> JobForecast:  # noqa: B008
    """Return a job's step; ArgumentError for an unknown way, and where ranks of a host meet without a local cost."""
    if way not in WAYS:
        raise ArgumentError(f"way: expected one of {', '.join(WAYS)}, got {way!r}")
    if job.ranks_per_host > 1 and not cluster.local:
        raise ArgumentError(f"ranks_per_host: expected 1 without a measured local cost, got {job.ranks_per_host}")
    if strategy.kind == SELDOM:
        whole = sum(work.tensors)
        exchange_s = collective_s(cluster, job, way)(whole) / strategy.every
        sent = sent_nbytes(cluster, job, way, whole) / strategy.every
        return JobForecast(way, job, work.compute_s + exchange_s, exchange_s, exchange_s, sent, None)
    zero = strategy.kind == ZERO3
    seconds = _divided_s(cluster, job) if zero else collective_s(cluster, job, way)
    overlap = work.overlap and not zero
    times = {"forward_s": work.forward_s, "backward_s": work.backward_s, "overlap": overlap}
    whole_s = step_s(work.buckets, seconds, update_s=work.other_s, **times)  # type: ignore[arg-type]
    best = recommend(work.tensors, seconds, **times).best if cluster.predicts else None  # type: ignore[arg-type]
    sent = sum(
        1.5 * sent_nbytes(cluster, job, RING, n) if zero else sent_nbytes(cluster, job, way, n) for n in work.buckets
    )
    communication_s = plan_s(work.buckets, seconds)
    return JobForecast(way, job, whole_s, communication_s, whole_s - work.compute_s, sent, best)


def collective_s(cluster: Cluster, job: Job, way: str) -> Callable[[float], float]:
    """Return the function from an all-reduce's bytes to its seconds.

    Before clcomm's own the hosts compare their calls, in a few bytes that cost latency alone (CLCOMM_CHECKS).
    """
    if way == HIERARCHICAL:
        compared_s = terms("all_gather", "doubling", job.hosts).rounds * cluster.link.alpha_s
        return lambda nbytes: compared_s + cluster.all_reduce_s(nbytes, job.ranks, job.hosts)
    within = cluster.message_within(job.ranks_per_host)
    return lambda nbytes: min(
        flat_s(name, nbytes, job.ranks, job.ranks_per_host, within, cluster.link) for name in _algorithms(way)
    )


def _divided_s(cluster: Cluster, job: Job) -> Callable[[float], float]:
    """Return the time of a unit in ZeRO's stage 3, by a ring: a reduce-scatter and two all-gathers."""
    whole_s = collective_s(cluster, job, RING)  # an all-reduce is a reduce-scatter and one all-gather
    return lambda nbytes: 1.5 * whole_s(nbytes)


def sent_nbytes(cluster: Cluster, job: Job, way: str, nbytes: float) -> float:
    """Return the bytes that a rank sends in an all-reduce; of a host's common memory nothing is sent."""
    if way == HIERARCHICAL:
        return terms("all_reduce", "ring", job.hosts).volume * nbytes / job.ranks_per_host
    within = cluster.message_within(job.ranks_per_host)
    chosen = min(
        _algorithms(way),
        key=lambda name: flat_s(name, nbytes, job.ranks, job.ranks_per_host, within, cluster.link),
    )
    return terms("all_reduce", chosen, job.ranks).volume * nbytes


def _algorithms(way: str) -> Sequence[str]:
    return ("ring",) if way == RING else ("doubling", "halving")


def jobs_of(ranks_per_host: int, hosts: int, least: int, most: int) -> list[Job]:
    """Return jobs of powers of two of hosts with `least` to `most` ranks, and the one with so many hosts."""
    powers = {1 << exponent for exponent in range(most.bit_length())}
    return [Job(n, ranks_per_host) for n in sorted(powers | {hosts})
            if n == hosts or least <= n * ranks_per_host <= most]  # fmt: skip


# --- Rounds of all-reduces among ranks that share their hosts' links: what passes the busiest link in each. ---
# A message of n bytes takes alpha + beta n seconds. Messages of one round that leave a host share its link, so that
# they take alpha + beta x (their bytes together), as do those that arrive; links carry both directions at once, and
# nothing but the hosts' links limits the network (a switch that does not block). Ranks are placed host by host.
#
# ring and halving are those of `clcomm.base.schedules`, but for halving's distances, which grow as MPICH's do (R.
# Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19,
# 2005), so that most of its bytes stay on a host. doubling is recursive doubling of the whole array (the same paper).

_Pairs = tuple[np.ndarray, np.ndarray]


class Round(NamedTuple):
    """Rounds that are alike.

    Attributes:
        times: how many there are.
        within: of the array, the part in a message between two ranks of a host; 0: there is none.
        between: of the array, the multiple that passes the busiest link of a host.
    """

    times: int
    within: float
    between: float

    def seconds(self, nbytes: float, within: Cost, link: Cost) -> float:
        """Return the time of all of them; ranks go on when the slowest message has arrived."""
        local_s = within.seconds(self.within * nbytes) if self.within else 0.0
        return self.times * max(local_s, link.seconds(self.between * nbytes) if self.between else 0.0)


def flat_s(algorithm: str, nbytes: float, ranks: int, ranks_per_host: int, within: Cost, link: Cost) -> float:
    """Return the seconds of an all-reduce whose ranks send to each other whatever their hosts are.

    Args:
        algorithm: "ring", "doubling" or "halving".
        within: a message between two ranks of a host while the others send too.
        link: a message between two hosts that have their links to themselves.
    """
    return sum(each.seconds(nbytes, within, link) for each in rounds_of(algorithm, ranks, ranks_per_host))


@lru_cache(maxsize=256)
def rounds_of(algorithm: str, ranks: int, ranks_per_host: int) -> tuple[Round, ...]:
    """Return an all-reduce's rounds; ArgumentError for an unknown algorithm, and for less than one rank."""
    if algorithm not in _MESSAGES:
        raise ArgumentError(f"algorithm: expected one of {', '.join(_MESSAGES)}, got {algorithm!r}")
    if ranks < 1 or ranks_per_host < 1:
        raise ArgumentError(f"ranks, ranks_per_host: expected numbers from 1 up, got {ranks} and {ranks_per_host}")
    if ranks == 1:
        return ()
    return tuple(
        Round(times, *_busiest(pairs, share, ranks_per_host)) for times, pairs, share in _MESSAGES[algorithm](ranks)
    )


def _busiest(pairs: _Pairs, share: float, ranks_per_host: int) -> tuple[float, float]:
    home, target = (ranks // ranks_per_host for ranks in pairs)
    leaves = home != target
    most = max((int(np.bincount(hosts[leaves]).max()) for hosts in (home, target)), default=0) if leaves.any() else 0
    return (0.0 if leaves.all() else share), most * share


def _ring(ranks: int) -> Iterator[tuple[int, _Pairs, float]]:
    senders = np.arange(ranks)
    yield 2 * (ranks - 1), (senders, (senders + 1) % ranks), 1 / ranks


def _doubling(ranks: int) -> Iterator[tuple[int, _Pairs, float]]:
    yield from _folded(ranks, [(distance, 1.0) for distance in _distances(ranks)])


def _halving(ranks: int) -> Iterator[tuple[int, _Pairs, float]]:
    halves = [(distance, 0.5 / distance) for distance in _distances(ranks)]
    yield from _folded(ranks, halves + halves[::-1])


def _distances(ranks: int) -> list[int]:
    """Return the distances of the pairs among the largest power of two up to `ranks`, growing."""
    return [1 << bit for bit in range(ranks.bit_length() - 1)]


def _folded(ranks: int, exchanges: list[tuple[int, float]]) -> Iterator[tuple[int, _Pairs, float]]:
    """Yield exchanges between pairs; of the first ranks, as many as exceed a power of two, each acts for two."""
    whole = 1 << (ranks.bit_length() - 1)
    surplus = ranks - whole
    places = np.arange(whole)
    places = np.where(places < surplus, 2 * places + 1, places + surplus)
    added = np.arange(surplus) * 2
    if surplus:
        yield 1, (added, added + 1), 1.0
    for distance, share in exchanges:
        yield 1, (places, places[np.arange(whole) ^ distance]), share
    if surplus:
        yield 1, (added + 1, added), 1.0


_MESSAGES = {"ring": _ring, "doubling": _doubling, "halving": _halving}
