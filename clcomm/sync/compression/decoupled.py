"""DeMo: each rank keeps the momentum of its own gradients, and sends only its strongest frequencies.

Momentum and update are the hook's: the optimizer is to be SGD without momentum, which steps by the sign that it gets.

Source: Peng, Quesnelle and Kingma, "DeMo: Decoupled momentum optimization", arXiv 2411.19870.
"""

from __future__ import annotations

import math

import numpy as np

from clcomm.base.host.arrays import BFLOAT16, from_bfloat16, to_bfloat16
from clcomm.sync.compression.coding import Work
from clcomm.sync.compression.quantized import COPIES_DIFFER, RemembersFlat
from clcomm.sync.compression.ranks import Task, prepare_exchange
from clcomm.sync.policies.codes import rows_of

#: Numbers are transformed in squares of so many rows; of the momentum a step keeps this share.
_EDGE, _DECAY = 64, np.float32(0.999)


#: A place in a square, and its value.
_SENT = np.dtype([("place", np.uint16), ("value", BFLOAT16)])


class DeMo(RemembersFlat):
    """A bucket's result is the sign of the ranks' mean of their `count` strongest frequencies in each 4,096 numbers."""

    refuses_parts = COPIES_DIFFER

    kept, has_plain_padding = "momentum", False

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def prepare(self, task: Task) -> Work:
        size, squares = task.gradient.size, -(-task.gradient.size // _EDGE**2)
        momentum = self.kept_of(task)
        is_parameter = _parameters_of(task)

        def encode(rows: np.ndarray, rank: int) -> Work:
            def run() -> None:
                np.multiply(momentum, _DECAY, out=momentum)
                np.add(momentum, task.gradient, out=momentum)
                frequencies = _transformed(rows_of(momentum, _EDGE**2).reshape(-1, _EDGE, _EDGE), _COSINES.T)
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
