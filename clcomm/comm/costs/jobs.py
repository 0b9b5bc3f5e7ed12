"""Forecasts of a training's step on jobs of other sizes, from what a rank computes and what links carry.

A rank's batch stays as it is (weak scaling), and so does what it computes in a step. No rank is slower than another:
waits for stragglers come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clcomm.base.errors import ArgumentError
from clcomm.comm.costs.forecast import Candidate, recommend
from clcomm.comm.costs.model import Cluster, plan_s, step_s, terms
from clcomm.comm.costs.rounds import flat_s

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
