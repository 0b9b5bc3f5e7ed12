"""What reduces the buckets, by the names that a Synchronizer's arguments give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.schedules import ALGORITHMS
from clcomm.comm.communicator import Communicator
from clcomm.sync.bucket_plan import hook_name
from clcomm.sync.compression import CommHook, parse_compression
from clcomm.sync.model_ranks import is_divided, refuse_mixing
from clcomm.sync.shared_space import SharedSpace

#: What the ranks' gradients can become.
COMBINATIONS = MEAN, ADASUM = ("mean", "adasum")


def hook_of(compression: str, algorithm: str | None, combination: str) -> CommHook | None:
    """Return what reduces each bucket, None for a plain all-reduce.

    Raises ArgumentError for an unknown name, and where more than one of the three asks for another than that.
    """
    hook = parse_compression(compression)
    if algorithm is not None:
        if hook is not None:
            raise ArgumentError(f"algorithm: expected None with compression {compression}, got {algorithm!r}")
        hook = AlgorithmHook(algorithm)
    if combination not in COMBINATIONS:
        raise ArgumentError(f"combination: expected one of {', '.join(COMBINATIONS)}, got {combination!r}")
    if combination == ADASUM:
        if hook is not None:
            raise ArgumentError(f"combination: expected 'mean' with compression {hook_name(hook)}, got 'adasum'")
        hook = AdasumHook()
    return hook


def refuse_hook(hook: CommHook, space: SharedSpace) -> None:
    """Raise ArgumentError, in all stages, where what reduces the buckets does not go with the model."""
    if isinstance(hook, AdasumHook):
        refuse_mixing(space, "combination='adasum'", "whose backward adds up gradients of several ranks")
    reason = getattr(hook, "refuses_parts", "")
    if reason and is_divided(space):
        raise ArgumentError(
            f"model: expected one that tensor-parallel ranks do not divide with {hook_name(hook)}, as {reason}, "
            "got one that they do"
        )


# --- A hook that reduces each bucket by one of `clcomm.base.schedules`' algorithms: to study them, not for speed. ---


class AlgorithmHook:
    """Averages a bucket with messages from rank to rank. The bits depend on where buckets end, as the order does."""

    elementwise = False

    def __init__(self, algorithm: str):
        if algorithm not in ALGORITHMS:
            raise ArgumentError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
        self.algorithm = algorithm

    def __call__(self, gradient: np.ndarray, comm: Communicator, out: np.ndarray, bucket: Bucket) -> None:
        comm.all_reduce(gradient, "mean", out=out, nbytes=bucket.nbytes, algorithm=self.algorithm)

    def __str__(self) -> str:
        return f"none, by {self.algorithm}"


# --- Adasum: a sum of vectors that takes of parallel ones the mean and of orthogonal ones the sum. ---
# S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021: equation 4 combines two vectors
# a and b to (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, and section 4.1 combines those of 2^k ranks by vector halving
# and distance doubling. At distance d rank r and rank r xor d give each other half of what they hold, so that 2d ranks
# have one part each of the same combination; its scalar products are the sums of the parts'. Then the parts go back the
# same way. A rank sends 2 (1 - 1/2^k) times its vectors' bytes, and needs memory for one copy of them and two halves.
#
# Beyond the largest power of two, rank 2^k + r first hands its vectors to rank r, and gets the result in the end.
#
# Small vectors are gathered instead, and every rank computes the same combinations of them: one message takes less time
# than those of all distances.

#: Vectors up to this size, for all ranks together, are gathered; so many bytes of a rank's at a time at most.
SMALL_BYTES, _GATHERED_BYTES = 256 << 10, 1 << 20
#: Elements that are converted to float64 at a time.
_BLOCK = 1 << 14
#: Of smaller squares float64 has too few bits to divide by them (Horovod has the same limit); such vectors are added.
_LEAST_SQUARE = math.sqrt(np.finfo(np.float64).tiny)


class AdasumHook:
    """Replaces a bucket's gradients by their adaptive sums over the ranks, tensor by tensor: a hook of a Synchronizer.

    A tensor's result does not depend on the bucket that it is in.
    """

    elementwise = True  # in the sense that any buckets give the same result
    refuses_parts = "its scalar products are of whole tensors"

    def __call__(self, gradient: np.ndarray, comm: Communicator, out: np.ndarray, bucket: Bucket) -> None:
        np.copyto(out, gradient)
        items = [slice(*((end - bucket.start) // out.itemsize for end in (p.start, p.stop))) for p in bucket.ranges]
        adasum(comm, [out[part] for part in items], "Adasum", "gradients")

    def __str__(self) -> str:
        return "adasum"


def adasum(comm: Communicator, vectors: Sequence[np.ndarray], operation: str, label: str = "") -> int:
    """Replace vectors by the ranks' adaptive sums, in place, and return how many bytes this rank sent; collective.

    Scalar products and combinations are computed in float64, and each combination is rounded to the vectors' dtype. A
    vector's result does not depend on the others.

    Args:
        comm: the ranks.
        vectors: flat, contiguous, of one real floating dtype; of the same lengths on every rank.
        operation, label: what messages call it.
    """
    with np.errstate(all="ignore"):  # the caller looks for NaN and Inf, as after any sum
        large = [each for each in vectors if each.nbytes * comm.size > SMALL_BYTES]
        sent = _by_halving(_Exchange(comm, large, operation, label)) if large else 0
        for together in _batches([each for each in vectors if each.nbytes * comm.size <= SMALL_BYTES]):
            own = np.concatenate(together)
            everyone = comm.all_gather(own, label=label, operation=operation)
            sent += own.nbytes
            cuts = np.cumsum([each.size for each in together])[:-1]
            for vector, rows in zip(together, np.split(everyone, cuts, axis=1), strict=True):
                vector[...] = of_rows(list(rows))
    return sent


def _batches(vectors: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Yield the vectors in lists of at most _GATHERED_BYTES."""
    batch: list[np.ndarray] = []
    for vector in vectors:
        if batch and sum(each.nbytes for each in batch) + vector.nbytes > _GATHERED_BYTES:
            yield batch
            batch = []
        batch.append(vector)
    if batch:
        yield batch


def of_rows(rows: list[np.ndarray]) -> np.ndarray:
    """Return the adaptive sum of all ranks' vectors."""
    paired = 1 << (len(rows).bit_length() - 1)
    rows = [_combination(a, b) for a, b in zip(rows, rows[paired:], strict=False)] + rows[len(rows) - paired : paired]
    while len(rows) > 1:
        rows = [_combination(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


def _combination(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return two vectors' combination, the same bits on every processor: a BLAS's dot would have another order."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    dot, of_first, of_second = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (a * _weight(dot, of_first) + b * _weight(dot, of_second)).astype(first.dtype)


def _by_halving(exchange: _Exchange) -> int:
    """Replace the exchange's vectors by their adaptive sums, and return how many bytes this rank sent; collective."""
    rank, size, vectors = exchange.rank, exchange.ranks, exchange.vectors
    paired = 1 << (size.bit_length() - 1)
    whole, nothing = [slice(0, each.size) for each in vectors], [slice(0, 0)] * len(vectors)
    is_beyond, beyond = rank >= paired, _partner_beyond(rank, size, paired)
    if size > paired:
        others = exchange.swap(beyond, *((whole, nothing) if is_beyond else (nothing, whole)))
        if beyond >= paired:
            _combine(vectors, others, _products(vectors, others))
    held, ways = nothing if is_beyond else whole, []
    for distance in (1 << level for level in range(paired.bit_length() - 1)):
        partner = -1 if is_beyond else rank ^ distance
        lower, upper = _halves(held)
        held, given = (upper, lower) if rank & distance else (lower, upper)
        ways.append((partner, held, given))
        others = exchange.swap(partner, given, held)
        own = [vector[part] for vector, part in zip(vectors, held, strict=True)]
        _combine(own, others, exchange.summed(_products(own, others), distance))
    for way in reversed(ways):
        exchange.fill(*way)
    if size > paired:
        exchange.fill(beyond, *((nothing, whole) if is_beyond else (whole, nothing)))
    return exchange.sent_nbytes


def _partner_beyond(rank: int, ranks: int, paired: int) -> int:
    """Return the rank at a distance of `paired` from this one; -1 where there is none."""
    partner = rank - paired if rank >= paired else rank + paired
    return partner if partner < ranks else -1


def _halves(parts: Sequence[slice]) -> tuple[list[slice], list[slice]]:
    middles = [(part.start + part.stop) // 2 for part in parts]
    lower = [slice(part.start, middle) for part, middle in zip(parts, middles, strict=True)]
    return lower, [slice(middle, part.stop) for part, middle in zip(parts, middles, strict=True)]


class _Exchange:
    """Swaps parts of the vectors between two ranks; every rank makes the same calls.

    Args:
        comm, vectors, operation, label: see `adasum`.

    Attributes:
        rank, ranks: this rank, and the number of them.
        vectors: see `adasum`.
        sent_nbytes: what this rank has sent.
    """

    def __init__(self, comm: Communicator, vectors: Sequence[np.ndarray], operation: str, label: str):
        self._comm, self.vectors, self._operation, self._label = comm, vectors, operation, label
        self.rank, self.ranks = comm.rank, comm.size
        self._dtype = vectors[0].dtype
        self.sent_nbytes = 0

    def swap(self, partner: int, given: Sequence[slice], taken: Sequence[slice]) -> list[np.ndarray]:
        """Send these parts to a rank, and return those that it sends; partner -1: none."""
        sends, receives = ([np.empty(0, self._dtype)] * self._comm.size for _ in range(2))
        lengths = [part.stop - part.start for part in taken] if partner >= 0 else [0] * len(taken)
        if partner >= 0:
            sends[partner] = np.concatenate([vector[part] for vector, part in zip(self.vectors, given, strict=True)])
            receives[partner] = np.empty(sum(lengths), self._dtype)
            self.sent_nbytes += sends[partner].nbytes
        self._comm.all_to_all(sends, receives, label=self._label, operation=self._operation)
        return np.split(receives[partner], np.cumsum(lengths)[:-1])

    def summed(self, products: np.ndarray, distance: int) -> np.ndarray:
        """Return the sums of the products of parts, (vectors, 3), over the ranks that have parts of the same two."""
        mine = [0, 2, 1] if self._comm.rank & distance else [0, 1, 2]  # a.b, the lower ranks' square, the upper ranks'
        sent = np.ascontiguousarray(products[:, mine])
        self.sent_nbytes += sent.nbytes
        first = self._comm.rank // (2 * distance) * 2 * distance
        everyone = self._comm.all_gather(sent, label=self._label)
        return np.asarray(everyone[first : first + 2 * distance].sum(axis=0)[:, mine])

    def fill(self, partner: int, given: Sequence[slice], taken: Sequence[slice]) -> None:
        """Send these parts to a rank, and write those that it sends to the vectors."""
        for vector, part, values in zip(self.vectors, taken, self.swap(partner, given, taken), strict=True):
            if partner >= 0:
                vector[part] = values


def _products(firsts: Sequence[np.ndarray], seconds: Sequence[np.ndarray]) -> np.ndarray:
    """Return a.b, a.a and b.b of each pair of vectors, (pairs, 3)."""
    found = np.zeros((len(firsts), 3))
    for row, first, second in zip(found, firsts, seconds, strict=True):
        for start in range(0, min(first.size, second.size), _BLOCK):
            a, b = (each[start : start + _BLOCK].astype(np.float64) for each in (first, second))
            row += (a @ b, a @ a, b @ b)
    return found


def _combine(owns: Sequence[np.ndarray], others: Sequence[np.ndarray], products: np.ndarray) -> None:
    """Replace vectors by their combinations with others; products: those of `_products(owns, others)`."""
    for own, other, (dot, of_own, of_other) in zip(owns, others, products, strict=True):
        for start in range(0, own.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            a, b = own[part].astype(np.float64), other[part].astype(np.float64)
            own[part] = a * _weight(dot, of_own) + b * _weight(dot, of_other)


def _weight(dot: float, square: float) -> float:
    return 1.0 - dot / (2.0 * square) if square >= _LEAST_SQUARE else 1.0
