"""Parameters: trainable tensors whose gradients have a place in the module's flat space."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import Unit
from clcomm.base.flat_space.parameters import FP16, Precision
from clcomm.engine.device import Device
from clcomm.engine.grad_slot import GradSlot
from clcomm.engine.tensor import Tensor

if TYPE_CHECKING:
    import pyopencl as cl
    from numpy.typing import ArrayLike


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


# --- Parameters stored in 16 bits: kernels read float32 copies that live as long as their launches. See stored.cl. ---


class StoredParameter(LazyParameter):
    """A parameter stored in 16 bits by its flat space."""

    __slots__ = ()
    exports_copy = True

    @property
    def buffer(self) -> Any:
        """A new float32 buffer of the values at each access; kernels' writes to it are lost."""
        return self.slot.space.expanded(self)  # type: ignore[union-attr]

    def copy_from(self, array_like: ArrayLike) -> None:
        """Overwrite the values with a host array of the same shape, rounded as it is stored; waits for the queue."""
        self.slot.space.narrow(self, self._array_of(array_like))  # type: ignore[union-attr]
        self.note_write()

    def _as_host_array(self) -> np.ndarray:
        """Return a copy, as no float32 memory exists to share."""
        return self.numpy().copy()


class Storage:
    """Moves parameters between float32 and a precision of 16 bits, on a device; offsets and counts are elements.

    Raises ArgumentError for fp16 on a device without half precision.
    """

    def __init__(self, device: Device, precision: Precision):
        if precision is FP16 and not device.has_half:
            raise ArgumentError(
                f"precision: expected bf16 or float32 on {device.name}, whose half_fp_config is 0 (no cl_khr_fp16), "
                f"got {precision}"
            )
        self._device = device
        self._defines: dict[str, Any] = {"FP16": 1} if precision is FP16 else {}

    def expand(self, stored: object, values: object, first: int, count: int) -> None:
        """Queue: values[:count] = stored[first : first + count]."""
        self._launch("expand", count, stored, values, first)

    def narrow(self, stored: object, values: object, first: int, first_value: int, count: int) -> None:
        """Queue: stored[first :] = values[first_value :], rounded to nearest, ties to even."""
        self._launch("narrow", count, stored, values, first, first_value)

    def narrowed(self, values: np.ndarray) -> np.ndarray:
        """Return values as they are stored, uint16; waits for the queue."""
        stored = self._device.allocate(2 * values.size)
        self.narrow(stored, self._device.upload(np.ascontiguousarray(values, np.float32)), 0, 0, values.size)
        bits = np.empty(values.size, np.uint16)
        self._device.read(stored, bits)
        return bits

    def reconcile(self, stored: object, masters: object, first: int, first_master: int, count: int) -> None:
        """Queue: each master that does not round to its stored value becomes that value."""
        self._launch("reconcile", count, stored, masters, first, first_master)

    def _launch(self, name: str, count: int, *args: object) -> None:
        device = self._device
        device.launch(device.kernel("stored", name, **self._defines), *device.grid(count), *args, count)


# --- Sharded parameters: a unit is gathered into memory while it is in use. ---


class GatheredParameter(LazyParameter):
    """A parameter whose unit is gathered at the first use of its memory, on all ranks at the same point."""

    __slots__ = ()

    @property
    def buffer(self) -> Any:
        """The device's buffer, valid until the next step; kernels' writes to it are lost."""
        return self._units.buffer_of(self)

    @property
    def _units(self) -> GatheredUnits:
        units: GatheredUnits = self.slot.space.gathered  # type: ignore[union-attr]
        return units

    def copy_from(self, array_like: ArrayLike) -> None:
        """Overwrite the values with a host array of the same shape, the same on every rank."""
        self._units.write(self, self._array_of(array_like))
        self.note_write()


class GatheredUnits:
    """The gathered units: the last ones used, and those that are still referenced.

    Args:
        gather: fills a buffer with the unit of this index; collective.
        advance: called at each use of a gathered unit; moves the units gathered ahead.
        write: writes an array into a named parameter's place in the ranks' shards.

    Attributes:
        keep: number of last used units to keep.
        peak_nbytes: the most bytes gathered at once.
    """

    #: One operation's parameters may lie in two units.
    keep = 2

    def __init__(
        self,
        device: Device,
        units: Sequence[Unit],
        parameters: Sequence[Parameter],
        gather: Callable[[int, object], None],
        advance: Callable[[], object],
        write: Callable[[str, np.ndarray], None],
    ):
        self._device, self._units = device, units
        self._gather, self._advance, self._write = gather, advance, write
        self._held: OrderedDict[int, Mapping[Parameter, cl.Buffer]] = OrderedDict()
        self._members: list[list[Parameter]] = []
        rest = list(parameters)
        for unit in units:
            own, rest = rest[: len(unit.ranges)], rest[len(unit.ranges) :]
            self._members.append(own)
        self._places = {
            parameter: (unit.index, place.name)
            for unit, members in zip(units, self._members, strict=True)
            for place, parameter in zip(unit.ranges, members, strict=True)
        }
        self.peak_nbytes = 0

    def buffer_of(self, parameter: Parameter) -> cl.Buffer:
        """Return a parameter's buffer; collective where its unit is not gathered."""
        self._device.not_replayable("uses parameters that are gathered from other ranks")
        index = self._places[parameter][0]
        held = self._held.get(index)
        if held is None:
            held = self._held[index] = self._gathered(index)
        else:
            self._held.move_to_end(index)
            self._advance()
        return held[parameter]

    def write(self, parameter: Parameter, values: np.ndarray) -> None:
        """Set a parameter's values; every rank does so with the same ones."""
        index, name = self._places[parameter]
        self._held.pop(index, None)
        self._device.finish()
        self._write(name, values)

    @contextmanager
    def all_gathered(self) -> Iterator[None]:
        """Keep all units gathered within a block, in which reading parameters moves nothing; collective."""
        before, self.keep = self.keep, len(self._units)
        try:
            for members in self._members:
                self.buffer_of(members[0])
            yield
        finally:
            self.keep = before
            self.release()

    def release(self) -> None:
        self._held.clear()

    def _gathered(self, index: int) -> Mapping[Parameter, cl.Buffer]:
        unit = self._units[index]
        while len(self._held) >= self.keep:  # before there is another
            self._held.popitem(last=False)
        block = self._device.memory.exact(unit.nbytes)
        held = sum(self._units[other].nbytes for other in self._held)
        self.peak_nbytes = max(self.peak_nbytes, held + unit.nbytes)
        self._gather(index, block)
        return {
            parameter: block.get_sub_region(place.start - unit.start, place.nbytes)
            for place, parameter in zip(unit.ranges, self._members[index], strict=True)
        }
