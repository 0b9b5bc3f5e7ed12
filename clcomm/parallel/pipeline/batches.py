"""Batches of a pipeline: compared between the ranks, and cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.comm.communicator import Communicator
from clcomm.engine.device import Device
from clcomm.engine.tensor import Shape, Tensor
from clcomm.sync.agreement import CHECKS, digest

#: Shape and dtype of a batch; None: this rank has none.
Form = tuple[Shape, str] | None
#: Bounds the memory for different batches.
_MOST_FORMS = 256


class BatchCheck:
    """Compares the ranks' batches, by hashes alone once a kind of batch has passed."""

    def __init__(self, comm: Communicator, micro_batches: int):
        self._comm, self._micro_batches = comm, micro_batches
        self._agreed: dict[bytes, tuple[Shape, str]] = {}

    def agreed(self, inputs: object, targets: object, *, needs_targets: bool, refusal: str = "") -> tuple[Shape, str]:
        """Return shape and dtype of the pipeline's inputs; collective.

        Args:
            refusal: the reason why this rank cannot go on.

        Raises:
            ArgumentError: a rank has a refusal, the first rank has no inputs or the last one no targets, or the batch
                cannot be cut; on every rank.
            MismatchError: ranks that have inputs, or targets, have different ones; on every rank.
        """
        own = _form("inputs", inputs), _form("targets", targets)
        said = repr((own, needs_targets, refusal)).encode()
        rows = self._comm.all_gather(np.frombuffer(digest(said), np.uint8), label=CHECKS)
        key = rows.tobytes()
        if key not in self._agreed:
            if len(self._agreed) >= _MOST_FORMS:
                self._agreed.clear()
            everyone = self._comm.all_gather_object((*own, needs_targets, refusal), label=CHECKS)
            self._agreed[key] = self._checked(everyone)
        return self._agreed[key]

    def _checked(self, everyone: Sequence[tuple[Form, Form, bool, str]]) -> tuple[Shape, str]:
        for rank, each in enumerate(everyone):
            if each[3]:
                raise ArgumentError(f"{each[3]}, on {self._comm.name_ranks([rank])}")
        if len({each[2] for each in everyone}) > 1:
            training = [rank for rank, each in enumerate(everyone) if each[2]]
            raise MismatchError(
                f"pipeline: expected the same call on every rank, got one with targets on "
                f"{self._comm.name_ranks(training)} alone"
            )
        for index, name in ((0, "inputs"), (1, "targets")):
            known = {rank: each[index] for rank, each in enumerate(everyone) if each[index] is not None}
            if len(set(known.values())) > 1:
                text = "; ".join(f"{form} on {self._comm.name_ranks([rank])}" for rank, form in known.items())
                raise MismatchError(
                    f"{name}: expected the same shape and dtype on every rank that has them, got {text}"
                )
        first, last, needs_targets = everyone[0][0], everyone[-1][1], everyone[0][2]
        if first is None:
            raise ArgumentError(f"inputs: expected an array on {self._comm.name_ranks([0])}, got None")
        if needs_targets and last is None:
            raise ArgumentError(f"targets: expected an array on {self._comm.name_ranks([len(everyone) - 1])}, got None")
        size = first[0][0]
        if size % self._micro_batches:
            raise ArgumentError(
                f"inputs: expected a batch that {self._micro_batches} micro-batches divide, got {size} samples"
            )
        if last is not None and last[0][0] != size:
            raise ArgumentError(f"targets: expected {size}, one for each input, got {last[0][0]}")
        return first


class MicroBatches:
    """A batch in parts of equal size, each brought to the device when it is needed."""

    def __init__(self, values: Any, count: int, device: Device):
        if isinstance(values, Tensor) and values.dtype == np.int32:  # the engine takes parts of float32 alone
            values = values.numpy()
        self._values, self._size, self._device = values, values.shape[0] // count, device

    def __getitem__(self, number: int) -> Tensor:
        part = self._values[number * self._size : (number + 1) * self._size]
        return part if isinstance(part, Tensor) else Tensor(part, self._device)


def _form(name: str, values: object) -> Form:
    if values is None:
        return None
    if not isinstance(values, (np.ndarray, Tensor)) or not values.ndim or not values.shape[0]:
        got = f"shape {values.shape}" if hasattr(values, "shape") else type(values).__name__
        raise ArgumentError(f"{name}: expected an array or a Tensor of samples, got {got}")
    is_whole = values.dtype.kind in "iu"
    return tuple(values.shape), np.dtype(np.int32 if is_whole else np.float32).str
