"""Forecasts from the cost model: the fastest bucket size, and how a job scales."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.comm.costs.model import Cluster, step_s
from clcomm.comm.stats.comm_stats import bus_factor

#: Tensors in the model's order, in bytes: those of models/convnet.py and models/mlp.py.
MODELS: dict[str, tuple[int, ...]] = {
    "convnet": (576, 64, 18432, 128, 802816, 512, 5120, 40),
    "mlp": (401408, 512, 65536, 512, 5120, 40),
}
_SMALLEST_BUCKET = 1 << 10
LARGEST_JOB = 4096


def equal_tensors(nbytes: int, tensors: int) -> tuple[int, ...]:
    """Return the sizes of `tensors` tensors of `nbytes` in total, equal to within a byte."""
    if not 1 <= tensors <= nbytes:
        raise ArgumentError(f"tensors: expected a number from 1 to the {nbytes} bytes, got {tensors}")
    bounds = [nbytes * index // tensors for index in range(tensors + 1)]
    return tuple(stop - start for start, stop in itertools.pairwise(bounds))


def bucket_bytes(tensors: Sequence[int], bucket_size: int | None) -> tuple[int, ...]:
    """Return the bytes of the buckets for tensors in the model's order; `bucket_size` None: a bucket for each."""
    layout = FlatLayout(ParameterSpec(str(index), (nbytes,), "uint8") for index, nbytes in enumerate(tensors))
    return tuple(bucket.nbytes for bucket in layout.buckets(bucket_size))


class Candidate(NamedTuple):
    """A bucket size (None: per tensor), its buckets in bytes, and the predicted seconds of a step."""

    bucket_size: int | None
    buckets: tuple[int, ...]
    seconds: float


class Recommendation(NamedTuple):
    """The best candidate, and all of them by size; sizes that make the same buckets are one, the smallest."""

    best: Candidate
    candidates: tuple[Candidate, ...]


def recommend(
    tensors: Sequence[int],
    all_reduce_s: Callable[[float], float],
    *,
    forward_s: float = 0.0,
    backward_s: float = 0.0,
    overlap: bool = False,
) -> Recommendation:
    """Return the bucket size with the fastest predicted step; of equally fast ones the one with the fewest buckets.

    Args:
        tensors: bytes of each tensor, in the model's order.
        all_reduce_s: seconds of an all-reduce by its bytes.
        forward_s, backward_s, overlap: see `step_s`.
    """
    sizes: list[int | None] = [None, _SMALLEST_BUCKET]
    while (size := sizes[-1]) is not None and size < sum(tensors):
        sizes.append(2 * size)
    found: dict[tuple[int, ...], Candidate] = {}
    for size in sizes:
        plan = bucket_bytes(tensors, size)
        if plan not in found:
            seconds = step_s(plan, all_reduce_s, forward_s=forward_s, backward_s=backward_s, overlap=overlap)
            found[plan] = Candidate(size, plan, seconds)
        elif found[plan].bucket_size is None:  # this size is the same as per tensor: name the size
            found[plan] = found[plan]._replace(bucket_size=size)
    candidates = tuple(found.values())
    fastest = min(candidate.seconds for candidate in candidates)
    alike = [candidate for candidate in candidates if candidate.seconds <= fastest * (1 + 1e-9)]
    return Recommendation(min(alike, key=lambda candidate: len(candidate.buckets)), candidates)


@dataclass(frozen=True)
class ScalingRow:
    """The predicted all-reduces of a step on some ranks and hosts, and their measured time where there is one."""

    ranks: int
    hosts: int
    local_s: float
    network_s: float
    measured_s: float | None
    busbw_bytes_per_s: float
    efficiency: float | None

    @property
    def predicted_s(self) -> float:
        return self.local_s + self.network_s

    @property
    def basis(self) -> str:
        return "extrapolated" if self.measured_s is None else "measured"


def scaling(
    cluster: Cluster,
    buckets: Sequence[int],
    *,
    ranks_per_host: int,
    measured_s: Mapping[tuple[int, int], float] | None = None,
    compute_s: float | None = None,
    largest: int = LARGEST_JOB,
) -> list[ScalingRow]:
    """Return a row for each power of two from 2 to `largest` ranks, and for each measured (ranks, hosts).

    Hosts are filled one after another.

    Args:
        cluster: the cost model.
        buckets: bytes of a step's buckets.
        ranks_per_host: ranks on each host but the last.
        measured_s: seconds of the buckets' all-reduces, by (ranks, hosts).
        compute_s: seconds of a step without its all-reduces. With it a row has an efficiency, computing over the whole
            step without overlap: throughput over that of as many single ranks, for a fixed batch a rank.
        largest: the largest number of ranks.
    """
    if ranks_per_host < 1:
        raise ArgumentError(f"ranks_per_host: expected a number from 1 up, got {ranks_per_host}")
    measured = dict(measured_s or {})
    powers = [1 << exponent for exponent in range(1, largest.bit_length())]
    places = {(ranks, -(-ranks // ranks_per_host)) for ranks in powers if ranks <= largest} | set(measured)
    rows = []
    for ranks, hosts in sorted(places):
        parts = [cluster.parts(nbytes, ranks, hosts) for nbytes in buckets]
        local_s, network_s = sum(part.local_s for part in parts), sum(part.network_s for part in parts)
        seconds = measured.get((ranks, hosts), local_s + network_s)
        bandwidth = sum(buckets) / seconds * bus_factor("all_reduce", ranks) if seconds else 0.0
        efficiency = None if compute_s is None else compute_s / (compute_s + seconds)
        rows.append(ScalingRow(ranks, hosts, local_s, network_s, measured.get((ranks, hosts)), bandwidth, efficiency))
    return rows


# --- Traffic of the all-reduces of `clcomm.base.schedules`: rounds, messages and bytes as formulas. ---
# The sources are those named there. With p ranks, an array of n bytes, w the largest power of two up to p, s = p - w:
#
#     algorithm  rounds                      messages of all ranks      bytes of all ranks
#     ring       2 (p - 1)                   2 p (p - 1)                2 (p - 1) n
#     halving    2 log2 w, and 2 if s > 0    2 w log2 w + 2 s           2 (w - 1) n + 2 s n
#     tree       2 ceil(log2 p)              2 (p - 1)                  2 (p - 1) n
#     direct     1                           p (p - 1)                  p (p - 1) n
#
# `clcomm.comm.costs.model.terms` has the time: that of the busiest rank, one message after another.


class Traffic(NamedTuple):
    """Traffic of all ranks together.

    Attributes:
        rounds: of consecutive messages.
        volume: bytes of all messages, in multiples of the array's.
    """

    rounds: int
    messages: int
    volume: int


def traffic(algorithm: str, ranks: int) -> Traffic:
    """Return the traffic of an all-reduce; ArgumentError for an unknown algorithm, and for less than one rank."""
    if algorithm not in _FORMULAS:
        raise ArgumentError(f"algorithm: expected one of {', '.join(_FORMULAS)}, got {algorithm!r}")
    if ranks < 1:
        raise ArgumentError(f"ranks: expected a number from 1 up, got {ranks}")
    return _FORMULAS[algorithm](ranks)


def _halving(p: int) -> Traffic:
    levels = p.bit_length() - 1
    w = 1 << levels
    s = p - w
    return Traffic(2 * levels + 2 * (s > 0), 2 * w * levels + 2 * s, 2 * (w - 1) + 2 * s)


_FORMULAS: dict[str, Callable[[int], Traffic]] = {
    "ring": lambda p: Traffic(2 * (p - 1), 2 * p * (p - 1), 2 * (p - 1)),
    "halving": _halving,
    "tree": lambda p: Traffic(2 * (p - 1).bit_length(), 2 * (p - 1), 2 * (p - 1)),
    "direct": lambda p: Traffic(int(p > 1), p * (p - 1), p * (p - 1)),
}
