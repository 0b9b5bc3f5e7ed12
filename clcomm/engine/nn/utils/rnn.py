"""Batches of sequences of several lengths, with PyTorch's names: padded ones with their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F
from clcomm.engine.tensor import Tensor, float_tensor

__all__ = ["PackedSequence", "Padded", "pack_padded_sequence", "pack_sequence", "pad_packed_sequence", "pad_sequence"]


class PackedSequence:
    """Sequences of several lengths for a recurrent layer, which `pack_padded_sequence` makes.

    They stay padded; `data` and `batch_sizes` are PyTorch's.

    Attributes:
        padded: float32 [T, N, ...], T the longest length; or int32.
        lengths: of each sequence.
    """

    def __init__(self, padded: Tensor, lengths: Sequence[int]):
        self.padded, self.lengths = padded, tuple(lengths)

    @property
    def batch_sizes(self) -> Tensor:
        """The number of sequences that have each step: int32 [T]."""
        return Tensor(np.array(self._present().sum(1), np.int32), self.padded.device)

    @property
    def data(self) -> Tensor:
        """The elements of all sequences, of a step those of the longest sequences first: [sum of lengths, ...]."""
        order = np.argsort(-np.array(self.lengths), kind="stable")
        steps, rows = np.nonzero(self._present()[:, order])
        places = Tensor((steps * len(order) + order[rows]).astype(np.int32), self.padded.device)
        whole = F.reshape(self.padded, (-1, *self.padded.shape[2:]))
        return F.index_select(whole, 0, places)

    def _present(self) -> np.ndarray:
        return np.arange(self.padded.shape[0])[:, None] < np.array(self.lengths)

    def lengths_on_device(self) -> Tensor:
        """Return the lengths as int32 [N]."""
        return Tensor(np.array(self.lengths, np.int32), self.padded.device)


class Padded(NamedTuple):
    """What `pad_packed_sequence` returns: the sequences, and int32 lengths."""

    sequences: Tensor
    lengths: Tensor


def pack_padded_sequence(
    input: Tensor, lengths: Tensor | Sequence[int], batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """Return padded sequences with their lengths, for RNN, LSTM or GRU.

    Args:
        input: [T, N, ...], or [N, T, ...] with `batch_first`.
        lengths: N whole numbers from 1 to T.
        enforce_sorted: expect the longest sequence first, as PyTorch does.

    Raises ArgumentError for other lengths.
    """
    given = lengths.numpy() if isinstance(lengths, Tensor) else np.asarray(lengths)
    if not isinstance(input, Tensor) or input.ndim < 2:
        raise ArgumentError(f"pack_padded_sequence: expected a Tensor of [T, N, ...], got {type(input).__name__}")
    padded = F.swap_dimensions(input, 0, 1) if batch_first else input
    steps, rows = padded.shape[:2]
    if given.shape != (rows,) or given.dtype.kind not in "iu" or given.min() < 1 or given.max() > steps:
        raise ArgumentError(
            f"pack_padded_sequence: lengths: expected {rows} whole numbers from 1 to {steps}, got {given.tolist()}"
        )
    if enforce_sorted and (given[:-1] < given[1:]).any():
        raise ArgumentError(
            "pack_padded_sequence: lengths: expected the longest first, got "
            f"{given.tolist()}; pass enforce_sorted=False"
        )
    return PackedSequence(padded[: int(given.max())], given.tolist())


def pad_packed_sequence(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> Padded:
    """Return (padded sequences [T, N, ...], lengths), T the longest length or `total_length`.

    Args:
        sequence: of `pack_padded_sequence`, or a layer's result.
        batch_first: return [N, T, ...].
        padding_value: stands behind each sequence.
        total_length: T; at least the longest length.

    Raises ArgumentError for a smaller `total_length`.
    """
    padded, steps = float_tensor("pad_packed_sequence", sequence.padded), sequence.padded.shape[0]
    more = (steps if total_length is None else total_length) - steps
    if more < 0:
        raise ArgumentError(f"pad_packed_sequence: total_length: expected at least {steps}, got {total_length}")
    present = sequence._present().reshape(steps, -1, *[1] * (padded.ndim - 2))
    padded = F.where(Tensor(present, padded.device), padded, float(padding_value))
    padded = F.pad(padded, [(0, more), *[(0, 0)] * (padded.ndim - 1)], float(padding_value))
    result = F.swap_dimensions(padded, 0, 1) if batch_first else padded
    return Padded(result, sequence.lengths_on_device())


def pad_sequence(sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0) -> Tensor:
    """Return float32 sequences [T_i, ...] as one tensor [T, N, ...], or [N, T, ...] with `batch_first`."""
    longest = max(each.shape[0] for each in sequences)
    widths = [[(0, longest - each.shape[0]), *[(0, 0)] * (each.ndim - 1)] for each in sequences]
    padded = [F.pad(each, width, padding_value) for each, width in zip(sequences, widths, strict=True)]
    return F.stack(padded, 0 if batch_first else 1)


def pack_sequence(sequences: Sequence[Tensor], enforce_sorted: bool = True) -> PackedSequence:
    """Return float32 sequences [T_i, ...] for a recurrent layer. See `pack_padded_sequence`."""
    return pack_padded_sequence(
        pad_sequence(sequences), [each.shape[0] for each in sequences], enforce_sorted=enforce_sorted
    )
