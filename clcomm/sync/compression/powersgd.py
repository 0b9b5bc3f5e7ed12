"""PowerSGD: each matrix of gradients is sent as two low-rank factors (Vogels, Karimireddy and Jaggi, 2019)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterRange
from clcomm.base.host.arrays import BFLOAT16, aligned_empty, aligned_zeros, from_bfloat16, to_bfloat16
from clcomm.comm.collectives.arguments import address_of
from clcomm.comm.transport.reduction import without_warnings
from clcomm.sync.compression.coding import Coding, Work
from clcomm.sync.compression.quantized import (
    COPIES_DIFFER,
    Feedback,
    FlatMemory,
    checked_entry,
    model_of,
    require_known,
)
from clcomm.sync.compression.ranks import PreparedHook, Ranks, Task, prepare_exchange


class PowerSGD(PreparedHook):
    """One step of power iteration from the last step's factors, with error feedback.

    One-dimensional tensors, and matrices that are no larger than their two factors, are sent whole.

    Args:
        rank: of the factors, their number of columns.
    """

    between_hosts = True

    def __init__(self, rank: int):
        self.rank = rank
        self.feedback = Feedback()
        self._factors: dict[tuple[int, str], np.ndarray] = {}

    def prepare(self, task: Task) -> Work:
        gradient, comm, bucket, coding = task.gradient, task.ranks, task.bucket, Coding(task.codec)
        wanted, mean = (aligned_zeros(gradient.nbytes).view(gradient.dtype) for _ in range(2))
        residual, key = self.feedback.residual_of(task), model_of(gradient, bucket)
        (matrices, whole), (targets, whole_targets) = self._split(wanted, bucket), self._split(mean, bucket)
        factored = [
            _Factored(coding, name, matrix, target, self.rank)
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
        return self.feedback.state_of(flat) | factors

    def check_state(self, layout: FlatLayout, state: Mapping[str, np.ndarray]) -> None:
        self.feedback.check_state(layout, state)
        ranges = {f"factor/{place.name}": place for place in layout.ranges if self._is_factored(place)}
        require_known(state, {"residual", *ranges})
        for name in ranges.keys() & state.keys():
            shape = (_as_matrix(ranges[name])[1], self.rank)
            if not np.isfinite(checked_entry(state, name, np.dtype(ranges[name].dtype), shape)).all():
                raise ArgumentError(f"state_dict[{name!r}]: expected finite numbers, got others")

    def load_state_of(self, flat: np.ndarray, state: dict[str, np.ndarray]) -> None:
        self.feedback.load_state_of(flat, state)
        for name, value in state.items():
            if name.startswith("factor/"):
                self._factors[address_of(flat), name.removeprefix("factor/")] = value.copy()

    def __str__(self) -> str:
        return f"powersgd:{self.rank}"


class _Factored:
    """A gradient matrix with its factors, (rank, rows) and (rank, columns), and the target of their product."""

    def __init__(self, coding: Coding, name: str, matrix: np.ndarray, target: np.ndarray, rank: int):
        self.name = name
        rows, columns = matrix.shape
        self.first, self.second = (aligned_empty((rank, length), matrix.dtype) for length in (rows, columns))
        self.project = coding.times(matrix, self.second, self.first)
        self.project_back = coding.transposed_times(matrix, self.first, self.second)
        self.expand = coding.outer(self.first, self.second, target)


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


# --- DeMo: each rank keeps the momentum of its own gradients, and sends only its strongest frequencies. ---
# Momentum and update are the hook's: the optimizer is to be SGD without momentum, which steps by the sign that it
# gets.
#
# Source: Peng, Quesnelle and Kingma, "DeMo: Decoupled momentum optimization", arXiv 2411.19870.

#: Numbers are transformed in squares of so many rows; of the momentum a step keeps this share.
_EDGE, _DECAY = 64, np.float32(0.999)
#: A place in a square, and its value.
_SENT = np.dtype([("place", np.uint16), ("value", BFLOAT16)])


class DeMo(PreparedHook):
    """A bucket's result is the sign of the ranks' mean of their `count` strongest frequencies in each 4,096 numbers."""

    refuses_parts = COPIES_DIFFER

    def __init__(self, count: int):
        self.count = count
        self._momentum = FlatMemory()

    def prepare(self, task: Task) -> Work:
        size, squares = task.gradient.size, -(-task.gradient.size // _EDGE**2)
        momentum = self._momentum.of(task.gradient, task.bucket, task.flat)
        is_parameter = _parameters_of(task)

        def encode(rows: np.ndarray, rank: int) -> Work:
            def run() -> None:
                np.multiply(momentum, _DECAY, out=momentum)
                np.add(momentum, task.gradient, out=momentum)
                frequencies = _transformed(_squares(momentum), _COSINES.T)
                sent = rows[rank].view(_SENT).reshape(squares, self.count)
                _put_strongest(frequencies.reshape(squares, -1), sent)
                own = np.zeros_like(frequencies)
                _add(sent, own.reshape(squares, -1))
                np.subtract(momentum, _transformed(own, _COSINES).reshape(-1)[:size], out=momentum)
                np.multiply(momentum, is_parameter, out=momentum)

            return run

        def decode(rows: np.ndarray) -> Work:
            def run() -> None:
                total = np.zeros((squares, _EDGE, _EDGE), np.float32)
                for row in rows:
                    _add(row.view(_SENT).reshape(squares, self.count), total.reshape(squares, -1))
                np.multiply(np.sign(_transformed_alike(total)).reshape(-1)[:size], is_parameter, out=task.out)

            return run

        return prepare_exchange(task.ranks, squares * self.count * _SENT.itemsize, np.uint8, encode, decode)

    def state_of(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return this rank's momentum of the model with gradients in `flat`, for a checkpoint."""
        return {"momentum": self._momentum.whole(flat)}

    def check_state(self, layout: FlatLayout, state: Mapping[str, np.ndarray]) -> None:
        """Raise ArgumentError unless `state` holds finite momentum of this layout."""
        momentum = checked_entry(state, "momentum", np.dtype(np.uint8), (layout.span,))
        require_known(state, {"momentum"})
        for place in layout.ranges:
            if not np.isfinite(layout.view(momentum, place.name)).all():
                raise ArgumentError(f"state_dict['momentum']: expected finite numbers, got others for {place.name!r}")

    def load_state_of(self, flat: np.ndarray, state: dict[str, np.ndarray]) -> None:
        self._momentum.load(flat, state["momentum"])

    def __str__(self) -> str:
        return f"demo:{self.count}"


def _cosines() -> np.ndarray:
    """Return the orthonormal type-II discrete cosine transform: column k has frequency k."""
    at, frequency = np.arange(_EDGE)[:, None] + 0.5, np.arange(_EDGE)[None, :]
    cosines = np.cos(math.pi / _EDGE * at * frequency) * math.sqrt(2 / _EDGE)
    cosines[:, 0] /= math.sqrt(2)
    found: np.ndarray = cosines.astype(np.float32)
    return found


_COSINES = _cosines()


def _parameters_of(task: Task) -> np.ndarray:
    """Return 1 for a bucket's parameters, and 0 for the padding between them, which is to stay zero."""
    found, item = np.zeros_like(task.gradient), task.gradient.itemsize
    for place in task.bucket.ranges:
        start, stop = max(place.start, task.bucket.start), min(place.stop, task.bucket.stop)
        found[(start - task.bucket.start) // item : (stop - task.bucket.start) // item] = 1
    return found


def _squares(values: np.ndarray) -> np.ndarray:
    squares = np.zeros((-(-values.size // _EDGE**2), _EDGE, _EDGE), np.float32)
    squares.reshape(-1)[: values.size] = values
    return squares


def _transformed(squares: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return the two-dimensional transform of each square: `_COSINES.T` analyses, `_COSINES` puts together."""
    return np.asarray(matrix @ squares @ matrix.T)


def _transformed_alike(squares: np.ndarray) -> np.ndarray:
    """Put squares together with the same bits on every rank: BLAS adds in an order that depends on the processor."""
    for axis in (1, 2):
        total = np.zeros_like(squares)
        for frequency in range(_EDGE):
            wave = _COSINES[:, frequency].reshape((-1, 1) if axis == 1 else (1, -1))
            total += wave * np.take(squares, [frequency], axis=axis)
        squares = total
    return squares


def _put_strongest(frequencies: np.ndarray, sent: np.ndarray) -> None:
    """Write the places and values of each row's largest magnitudes, in the order of places."""
    places = np.argpartition(-np.abs(frequencies), sent.shape[1] - 1, axis=1)[:, : sent.shape[1]]
    places.sort(axis=1)
    sent["place"], sent["value"] = places, to_bfloat16(np.take_along_axis(frequencies, places, axis=1))


def _add(sent: np.ndarray, rows: np.ndarray) -> None:
    """Add what a rank has sent to rows of frequencies."""
    places, values = sent["place"].astype(np.int64), from_bfloat16(np.ascontiguousarray(sent["value"]))
    np.put_along_axis(rows, places, np.take_along_axis(rows, places, axis=1) + values, axis=1)
