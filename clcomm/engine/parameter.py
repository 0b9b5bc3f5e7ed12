"""Parameters: trainable tensors whose gradients have a place in the module's flat space."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.device import Device
from clcomm.engine.grad_slot import GradSlot
from clcomm.engine.tensor import Tensor


class ParameterPart(Protocol):
    """A parameter's part of a whole array that several ranks hold; see `clcomm.parallel`."""

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole of which a part has `shape`."""

    def gather(self, part: np.ndarray) -> np.ndarray:
        """Return the whole, on every rank; collective."""

    def own(self, whole: np.ndarray) -> np.ndarray:
        """Return this rank's part of the whole."""

    @property
    def ranks(self) -> int:
        """Number of ranks that hold parts."""

    def gather_numbers(self, own: np.ndarray) -> np.ndarray:
        """Return the numbers of all ranks that hold parts, a row for each; collective."""


class Stages(Protocol):
    """The ranks of a pipeline's stages, of which this rank has some; see `clcomm.parallel`."""

    def counts(self, parameter: Parameter) -> bool:
        """Return whether a parameter counts here, and not on another stage's rank that has it too."""

    def gather_numbers(self, own: np.ndarray) -> np.ndarray:
        """Return the numbers of all ranks, a row for each; collective."""


class Parameter(Tensor):
    """A tensor that a module trains; its gradient lies in the flat space once the module has one.

    Attributes:
        part: of a whole array, which the module's `state_dict` holds; None: the parameter is whole.
        stages: the ranks of the model's other stages; None: this rank has the whole model.
    """

    __slots__ = ("part", "slot", "stages")

    def __init__(self, array_like: object, device: Device | str | None = None, requires_grad: bool = True):
        self.slot: GradSlot | None = None
        self.part: ParameterPart | None = None
        self.stages: Stages | None = None
        super().__init__(array_like, device, requires_grad)
        if 0 in self.shape:
            raise ArgumentError(f"Parameter: expected one element or more, got shape {self.shape}")

    @property
    def grad(self) -> Tensor | None:
        """The gradient, or None; in a flat space this rank's own, or the average after a synchronisation."""
        return self._grad if self.slot is None else self.slot.gradient()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and value.shape != self.shape:
            raise ArgumentError(f"grad: expected shape {self.shape}, got {value.shape}")
        if self.slot is None:
            self._grad = value
        else:
            self.slot.assign(value)

    def claim_gradient(self) -> Tensor | None:
        return super().claim_gradient() if self.slot is None else self.slot.claim()

    def gradient_for_update(self) -> Tensor:
        return super().gradient_for_update() if self.slot is None else self.slot.for_update()

    def detach(self) -> Tensor:
        """Return a view of the values that is not on the tape: it follows the parameter to other memory."""
        return self._functional.following(self, super().detach())

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, Parameter)
        copied.part = self.part
        return copied

    def _pickled_as(self) -> type[Tensor]:
        return Parameter


class LazyParameter(Parameter):
    """A parameter whose buffer is made where it is used, so that its slot knows of writes."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        """Raise ArgumentError: what a kernel writes to a buffer of the values is lost."""
        raise ArgumentError(
            "data: expected a parameter with float32 memory of its own, got one that is stored in 16 bits or divided "
            "between ranks; use the parameter itself, in no_grad() to write to it"
        )

    @property
    def written_at(self) -> int:
        return -1 if self.slot is None else self.slot.written_at

    def note_write(self) -> None:
        if self.slot is not None:
            self.device.note_write(self.slot)
