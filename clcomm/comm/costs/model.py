"""A cost model of communication: latency plus bytes over bandwidth, fitted to measurements.

Sending n bytes takes alpha + beta n seconds (R. Hockney, "The communication challenge for MPP", Parallel Computing 20,
1994). A collective is a number of rounds of such messages (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
collective communication operations in MPICH", IJHPCA 19, 2005), so it takes rounds x alpha + volume x beta x n.
Arithmetic is part of the measured beta.

Everything here is a pure function of numbers. Times are seconds, sizes bytes; n is an operation's size as
`clcomm bench` counts it: the array for all-reduce, broadcast and reduce-scatter, the gathered whole for all-gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from clcomm.base.errors import ArgumentError

#: Algorithms between hosts; "best" takes the fastest of the others for each size, as MPI libraries do.
ALGORITHMS = ("ring", "recursive", "best")
_HUBER = 1.345  # residuals beyond so many standard deviations get less weight (P. Huber, 1964)
_MOST_ROUNDS_OF_FIT = 50
Bytes = TypeVar("Bytes", float, np.ndarray)  # a number of bytes and its seconds, or arrays of them


@dataclass(frozen=True)
class Cost:
    """Latency in seconds and seconds a byte, of one message or of a whole collective."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, nbytes: Bytes) -> Bytes:
        """Return the seconds for a number of bytes, or an array of seconds for an array."""
        return self.alpha_s + self.beta_s_per_byte * nbytes


@dataclass(frozen=True)
class Fit:
    """A cost fitted to measured (bytes, seconds), and its errors: |predicted / measured - 1|."""

    cost: Cost
    median_error: float
    max_error: float
    points: tuple[tuple[int, float], ...]


class MeasuredFit(NamedTuple):
    """A fit of one transport's all-reduce, on some ranks and hosts; `sums` as `Communicator.sums`."""

    transport: str
    ranks: int
    hosts: int
    fit: Fit
    sums: str = "numpy"


def fit(points: Iterable[tuple[int, float]]) -> Fit:
    """Fit alpha and beta, neither negative, to measured (bytes, seconds) by robust relative least squares.

    Residuals are relative to the prediction, so that 1 KiB weighs as much as 1 GiB and noise adds no bias; outliers
    weigh less (Huber's weights). Both are iterated. Raises ArgumentError for fewer than two different sizes and for
    times that are not above zero.
    """
    measured = tuple((int(nbytes), float(seconds)) for nbytes, seconds in points)
    if len({nbytes for nbytes, _ in measured}) < 2:
        raise ArgumentError(f"points: expected two different sizes or more, got {len(measured)} measurements")
    if not all(nbytes >= 0 and 0 < seconds < math.inf for nbytes, seconds in measured):
        raise ArgumentError("points: expected sizes of 0 bytes or more and finite times above 0 s")
    sizes, times = np.array(measured, np.float64).T
    predicted, weights = times, np.ones_like(times)
    for _ in range(_MOST_ROUNDS_OF_FIT):
        cost = _weighted_fit(sizes, times, np.sqrt(weights) / predicted)
        before, predicted = predicted, np.maximum(cost.seconds(sizes), 1e-3 * times)
        residuals = np.abs(times / predicted - 1)
        spread = 1.4826 * float(np.median(residuals))  # the standard deviation, were they normal
        weights = np.minimum(1, _HUBER * max(spread, 1e-9) / np.maximum(residuals, 1e-12))
        if np.allclose(predicted, before, rtol=1e-9, atol=0):
            break
    errors = np.abs(cost.seconds(sizes) / times - 1)
    return Fit(cost, float(np.median(errors)), float(errors.max()), measured)


def _weighted_fit(sizes: np.ndarray, times: np.ndarray, weights: np.ndarray) -> Cost:
    """Minimise the sum of the squares of weight x (alpha + beta n - t) over alpha, beta >= 0."""
    columns, target = np.stack([weights, weights * sizes], axis=1), weights * times
    scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    columns /= scale
    best = np.linalg.lstsq(columns, target, rcond=None)[0]
    if (best < 0).any():  # then one of the two is zero: fit the other alone
        alone = np.diag(columns.T @ target)
        best = min(alone, key=lambda candidate: float(np.sum((columns @ candidate - target) ** 2)))
    alpha, beta = best / scale
    return Cost(float(alpha), float(beta))


# --- collectives -------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """A collective's messages: `rounds` latencies, and `volume` times its size in bytes."""

    rounds: float
    volume: float

    def of(self, message: Cost) -> Cost:
        """Return the collective's cost, given the cost of a message."""
        return Cost(self.rounds * message.alpha_s, self.volume * message.beta_s_per_byte)

    def message(self, collective: Cost) -> Cost:
        """Return a message's cost, given the collective's: the inverse of `of`."""
        return Cost(collective.alpha_s / self.rounds, collective.beta_s_per_byte / self.volume)


def terms(operation: str, algorithm: str, ranks: int) -> Terms:
    """Return rounds and volume of an operation on `ranks` ranks.

    all_reduce: "ring" (reduce-scatter and all-gather, in `ranks - 1` rounds each, as in clcomm's mpi transport),
    "doubling" (recursive doubling), "halving" (recursive halving, then doubling; Rabenseifner's), "tree" (binomial, to
    one rank and back), "direct" (each rank sends its array to every other, one after another); all_gather:
    "ring", "doubling"; reduce_scatter: "ring", "halving"; broadcast: "tree" (binomial), "scatter" (van de Geijn's).
    If `ranks` is not a power of two, "doubling" and "halving" of an all-reduce first add the surplus ranks' arrays to
    others' and send them the result at the end: two rounds of the whole size.
    """
    if ranks < 1:
        raise ArgumentError(f"ranks: expected a number from 1 up, got {ranks}")
    found = _TERMS.get((operation, algorithm))
    if found is None:
        known = ", ".join(f"{its_operation} by {name}" for its_operation, name in _TERMS)
        raise ArgumentError(f"algorithm: expected one of {known}; got {operation} by {algorithm}")
    return found(ranks) if ranks > 1 else Terms(0, 0)


def _ceil_log2(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _doubling(ranks: int) -> Terms:
    whole, fold = _power_of_two(ranks)
    return Terms(_ceil_log2(whole) + fold, _ceil_log2(whole) + fold)


def _halving(ranks: int) -> Terms:
    whole, fold = _power_of_two(ranks)
    return Terms(2 * _ceil_log2(whole) + fold, 2 * (whole - 1) / whole + fold)


def _power_of_two(ranks: int) -> tuple[int, int]:
    """Return the largest power of two up to `ranks`, and the extra rounds for the surplus ranks."""
    whole = 1 << (ranks.bit_length() - 1)
    return whole, 0 if whole == ranks else 2


_TERMS: dict[tuple[str, str], Callable[[int], Terms]] = {
    ("all_reduce", "ring"): lambda p: Terms(2 * (p - 1), 2 * (p - 1) / p),
    ("all_reduce", "doubling"): _doubling,
    ("all_reduce", "halving"): _halving,
    ("all_reduce", "tree"): lambda p: Terms(2 * _ceil_log2(p), 2 * _ceil_log2(p)),
    ("all_reduce", "direct"): lambda p: Terms(p - 1, p - 1),
    ("all_gather", "ring"): lambda p: Terms(p - 1, (p - 1) / p),
    ("all_gather", "doubling"): lambda p: Terms(_ceil_log2(p), (p - 1) / p),
    ("reduce_scatter", "ring"): lambda p: Terms(p - 1, (p - 1) / p),
    ("reduce_scatter", "halving"): lambda p: Terms(_ceil_log2(p), (p - 1) / p),
    ("broadcast", "tree"): lambda p: Terms(_ceil_log2(p), _ceil_log2(p)),
    ("broadcast", "scatter"): lambda p: Terms(_ceil_log2(p) + p - 1, 2 * (p - 1) / p),
}
_ALL_REDUCES = {"ring": ("ring",), "recursive": ("doubling", "halving"), "best": ("ring", "doubling", "halving")}


# --- ranks and hosts ---------------------------------------------------------------------------------------------


class AllReduceTime(NamedTuple):
    """Seconds of an all-reduce within the hosts and between them."""

    local_s: float
    network_s: float

    @property
    def total_s(self) -> float:
        return self.local_s + self.network_s


@dataclass(frozen=True)
class Cluster:
    """Equal hosts: `local` has the measured all-reduce within one, by its ranks; `link` a message between two.

    Between hosts each local rank reduces its shard with its peers; all shards of a host share its link, so together
    they move n bytes by `algorithm`, as one rank would. Without `local` every rank counts as a host of its own.
    """

    local: Mapping[int, Cost]
    link: Cost
    algorithm: str = "ring"

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ArgumentError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {self.algorithm!r}")
        if any(ranks < 2 for ranks in self.local):
            raise ArgumentError("local: expected costs for 2 ranks or more")

    def parts(self, nbytes: float, ranks: int, hosts: int) -> AllReduceTime:
        """Return the time of an all-reduce of `nbytes` on `ranks` ranks, spread evenly over `hosts` hosts."""
        if not 1 <= hosts <= ranks:
            raise ArgumentError(f"hosts: expected a number from 1 to the {ranks} ranks, got {hosts}")
        if not self.local:
            return AllReduceTime(0.0, self._between(nbytes, ranks))
        return AllReduceTime(self._within(-(-ranks // hosts)).seconds(nbytes), self._between(nbytes, hosts))

    def all_reduce_s(self, nbytes: float, ranks: int, hosts: int) -> float:
        return self.parts(nbytes, ranks, hosts).total_s

    @property
    def predicts(self) -> bool:
        """Whether the time of any size is known, not only of those that were measured."""
        return not any(math.isnan(cost.alpha_s) for cost in self.local.values())

    def message_within(self, ranks: int) -> Cost:
        """Return the cost of a message between two ranks of a host while all of its `ranks` send one.

        As in `_within`: a rank that sums polls ranks - 1 others, a message waits for one; ranks + 1 arrays pass the
        memory there, here each rank reads one and writes one.
        """
        if ranks == 1:
            return Cost(0.0, 0.0)
        cost = self._within(ranks)
        return Cost(cost.alpha_s / (ranks - 1), cost.beta_s_per_byte * 2 * ranks / (ranks + 1))

    def _within(self, ranks: int) -> Cost:
        """Return the cost on one host: as measured, else scaled from the largest measured number of ranks.

        Each rank polls the counters of all others, so latency grows with ranks - 1; all ranks together read `ranks`
        arrays and write one through one memory, so the time a byte grows with ranks + 1.
        """
        if ranks == 1:
            return Cost(0.0, 0.0)
        if ranks in self.local:
            return self.local[ranks]
        known = max(self.local)
        cost = self.local[known]
        return Cost(cost.alpha_s * (ranks - 1) / (known - 1), cost.beta_s_per_byte * (ranks + 1) / (known + 1))

    def _between(self, nbytes: float, hosts: int) -> float:
        names = _ALL_REDUCES[self.algorithm]
        return min(terms("all_reduce", name, hosts).of(self.link).seconds(nbytes) for name in names)


def cluster_of(fits: Sequence[MeasuredFit], algorithm: str = "ring") -> tuple[Cluster, str]:
    """Return the cost model of hosts like the measured ones, and the source of its link between hosts as text.

    The link is a message of a ring. With several hosts, the ring is the difference between the hierarchical transport
    and an all-reduce within one host, else the mpi transport between single ranks; with one host, the mpi transport
    through its memory, on the most ranks.
    """
    local = {each.ranks: each.fit.cost for each in fits if each.transport == "shared" and each.hosts == 1}
    for whole in fits:
        between_s = _between(whole, local) if whole.transport == "hierarchical" else None
        if between_s is not None:
            link = terms("all_reduce", "ring", whole.hosts).message(between_s)
            return Cluster(local, link, algorithm), f"hierarchical, {whole.ranks} ranks on {whole.hosts} hosts"
    through_mpi = [each for each in fits if each.transport == "mpi"]
    between = [each for each in through_mpi if each.hosts == each.ranks]
    chosen = max(between or through_mpi, key=lambda each: each.ranks)
    link = terms("all_reduce", "ring", chosen.ranks).message(chosen.fit.cost)
    source = f"mpi between {chosen.hosts} hosts" if between else f"mpi on one host, {chosen.ranks} ranks"
    return Cluster(local, link, algorithm), source


def _between(whole: MeasuredFit, local: Mapping[int, Cost]) -> Cost | None:
    """Return a job's all-reduce less that within one of its hosts; None: unknown."""
    within = local.get(-(-whole.ranks // whole.hosts))
    if within is None:
        return None
    cost = whole.fit.cost
    between = Cost(cost.alpha_s - within.alpha_s, cost.beta_s_per_byte - within.beta_s_per_byte)
    return between if between.alpha_s > 0 and between.beta_s_per_byte > 0 else None


# --- buckets and steps -------------------------------------------------------------------------------------------


def plan_s(buckets: Iterable[float], all_reduce_s: Callable[[float], float]) -> float:
    """Return the seconds of consecutive all-reduces of these buckets, in bytes."""
    return math.fsum(all_reduce_s(nbytes) for nbytes in buckets)


def step_s(
    buckets: Sequence[float],
    all_reduce_s: Callable[[float], float],
    *,
    forward_s: float = 0.0,
    backward_s: float = 0.0,
    update_s: float = 0.0,
    overlap: bool = False,
) -> float:
    """Return the seconds of a step whose backward completes the buckets in order, at an even rate of bytes.

    Args:
        buckets: their bytes, in the order of completion.
        all_reduce_s: seconds of an all-reduce by its bytes.
        forward_s, backward_s, update_s: seconds of the step's other parts.
        overlap: a bucket's all-reduce starts when its gradients are complete and the one before it is done, and slows
            nothing else down; otherwise all of them follow backward.
    """
    if not overlap:
        return forward_s + backward_s + plan_s(buckets, all_reduce_s) + update_s
    total, complete, done_s = math.fsum(buckets), 0.0, 0.0
    for nbytes in buckets:
        complete += nbytes
        ready_s = backward_s * complete / total if total else backward_s
        done_s = max(done_s, ready_s) + all_reduce_s(nbytes)
    return forward_s + max(backward_s, done_s) + update_s
