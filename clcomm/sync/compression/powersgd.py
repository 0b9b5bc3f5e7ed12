"""PowerSGD: each matrix of gradients is sent as two low-rank factors (Vogels, Karimireddy and Jaggi, 2019)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterRange
from clcomm.base.host.arrays import aligned_empty, aligned_zeros
from clcomm.comm.collectives.arguments import address_of
from clcomm.comm.transport.reduction import without_warnings
from clcomm.sync.compression.coding import Codec, Work, outer, prepared, times, transposed_times
from clcomm.sync.compression.quantized import RemembersFlat, checked_entry, model_of
from clcomm.sync.compression.ranks import Ranks, Task


class PowerSGD(RemembersFlat):
    """One step of power iteration from the last step's factors, with error feedback.

    One-dimensional tensors, and matrices that are no larger than their two factors, are sent whole.

    Args:
        rank: of the factors, their number of columns.
    """

    between_hosts = True

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank
        self._factors: dict[tuple[int, str], np.ndarray] = {}

    def prepare(self, task: Task) -> Work:
        gradient, comm, bucket = task.gradient, task.ranks, task.bucket
        wanted, mean = (aligned_zeros(gradient.nbytes).view(gradient.dtype) for _ in range(2))
        residual, key = self.kept_of(task), model_of(gradient, bucket)
        (matrices, whole), (targets, whole_targets) = self._split(wanted, bucket), self._split(mean, bucket)
        factored = [
            _Factored(task.codec, name, matrix, target, self.rank)
            for (name, matrix), (_, target) in zip(matrices, targets, strict=True)
        ]

        def run() -> None:
            np.add(gradient, residual, out=wanted)
            for each in factored:
                each.second[...] = self._factor(key, each.name, each.second.shape[1], wanted.dtype).T
                each.project()
            for each, first in zip(factored, _all_mean(comm, [each.first for each in factored]), strict=True):
                each.first[...] = _orthogonal(first.T).T
                each.project_back()
            parts = [*(each.second for each in factored), np.concatenate([np.zeros(0, wanted.dtype), *whole])]
            *seconds, rest = _all_mean(comm, parts)
            for each, second in zip(factored, seconds, strict=True):
                each.second[...] = second
                each.expand()
                self._factors[key, each.name] = np.nan_to_num(second.T)
            for target, start in zip(whole_targets, _starts(whole), strict=False):
                target[...] = rest[start : start + target.size]
            np.subtract(wanted, mean, out=wanted)
            for exact in whole:
                exact[...] = 0
            residual[...] = np.where(np.isfinite(wanted), wanted, 0)
            np.copyto(task.out, mean)

        return without_warnings(run)

    def _split(self, flat: np.ndarray, bucket: Bucket) -> tuple[list[tuple[str, np.ndarray]], list[np.ndarray]]:
        """Return (name, matrix) of the factored tensors, and the arrays sent whole; all are views."""
        matrices, whole = [], []
        for place in bucket.ranges:
            start = (place.start - bucket.start) // flat.itemsize
            view = flat[start : start + place.nbytes // flat.itemsize]
            rows, columns = _as_matrix(place)
            if self._is_factored(place):
                matrices.append((place.name, view.reshape(rows, columns)))
            else:
                whole.append(view)
        return matrices, whole

    def _is_factored(self, place: ParameterRange) -> bool:
        rows, columns = _as_matrix(place)
        return self.rank * (rows + columns) < rows * columns

    def _factor(self, key: int, name: str, columns: int, dtype: np.dtype) -> np.ndarray:
        kept = self._factors.get((key, name))
        if kept is not None:
            return kept
        return np.random.default_rng(list(name.encode())).standard_normal((columns, self.rank)).astype(dtype)

    def state_of(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        base = address_of(flat)
        factors = {f"factor/{name}": value for (key, name), value in self._factors.items() if key == base}
        return super().state_of(flat) | factors

    def check_state(self, layout: FlatLayout, state: Mapping[str, np.ndarray], known: Collection[str] = ()) -> None:
        ranges = {f"factor/{place.name}": place for place in layout.ranges if self._is_factored(place)}
        super().check_state(layout, state, ranges)
        for name in ranges.keys() & state.keys():
            shape = (_as_matrix(ranges[name])[1], self.rank)
            if not np.isfinite(checked_entry(state, name, np.dtype(ranges[name].dtype), shape)).all():
                raise ArgumentError(f"state_dict[{name!r}]: expected finite numbers, got others")

    def load_state_of(self, flat: np.ndarray, state: dict[str, np.ndarray]) -> None:
        super().load_state_of(flat, state)
        for name, value in state.items():
            if name.startswith("factor/"):
                self._factors[address_of(flat), name.removeprefix("factor/")] = value.copy()

    def __str__(self) -> str:
        return f"powersgd:{self.rank}"


class _Factored:
    """A gradient matrix with its factors, (rank, rows) and (rank, columns), and the target of their product."""

    def __init__(self, codec: Codec | None, name: str, matrix: np.ndarray, target: np.ndarray, rank: int):
        self.name = name
        rows, columns = matrix.shape
        self.first, self.second = (aligned_empty((rank, length), matrix.dtype) for length in (rows, columns))
        self.project = prepared(codec, times, matrix, self.second, self.first)
        self.project_back = prepared(codec, transposed_times, matrix, self.first, self.second)
        self.expand = prepared(codec, outer, self.first, self.second, target)


def _as_matrix(place: ParameterRange) -> tuple[int, int]:
    """Return a tensor's shape as a matrix: its first dimension by the product of the others."""
    return place.shape[0] if place.shape else 1, math.prod(place.shape[1:])


def _starts(arrays: list[np.ndarray]) -> list[int]:
    return [0, *itertools.accumulate(array.size for array in arrays)]


def _all_mean(comm: Ranks, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return the ranks' means of several arrays, in one all-reduce."""
    if not arrays:
        return []
    together = comm.all_reduce(np.concatenate([array.reshape(-1) for array in arrays]), "mean")
    starts = _starts(arrays)
    return [together[start : start + a.size].reshape(a.shape) for a, start in zip(arrays, starts, strict=False)]


def _orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of the matrix's columns, by Gram-Schmidt in float64; zero columns stay zero."""
    result = matrix.astype(np.float64)
    for index in range(result.shape[1]):
        column = result[:, index]
        for earlier in range(index):
            column -= np.sum(result[:, earlier] * column) * result[:, earlier]
        length = math.sqrt(float(np.sum(column * column)))
        column *= 1 / length if length > 1e-30 else 0.0
    return result.astype(matrix.dtype)
