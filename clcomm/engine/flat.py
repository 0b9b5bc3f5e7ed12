"""The flat space: every trainable parameter and its gradient have one place in two flat buffers of one layout.

Kernels write gradients straight into `grads`. After a synchronisation the averaged gradients lie in `reduced`: on a
device that shares the host's memory that is a third array, which several ranks may read, and which nobody here writes;
on a discrete device it is `grads` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from clcomm.engine.device import HOST_POINTER_ALIGNMENT, Device
from clcomm.engine.grad_slot import LOCAL, NONE, REDUCED, SENT, GradSlot
from clcomm.engine.mark import QueueMark
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor, wrap
from clcomm.errors import ArgumentError
from clcomm.layout import FlatLayout, ParameterSpec


class FlatSpace:
    """Parameters and gradients of a model in flat buffers; `layout` tells where each one lies.

    `params` and `grads` are OpenCL buffers of `layout.span` bytes, padding zero. Parameters given to it become views of
    `params`. Raises ArgumentError for parameters on several devices, none at all, or already in a flat space.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Parameter]]):
        named = list(named_parameters)
        _check(named)
        self.device: Device = named[0][1].device
        self.layout = FlatLayout([ParameterSpec(name, p.shape) for name, p in named])
        by_name = dict(named)
        self.parameters = [by_name[slot.name] for slot in self.layout.slots]
        self.slots = [GradSlot(self) for _ in self.parameters]
        self._moves: dict[tuple[int, int], tuple[Callable[[], None], Callable[[], None]]] = {}  # of buckets: they stay
        self._host: dict[str, np.ndarray] | None = None
        self._staged = True  # whether the device's memory is apart from the host arrays
        params = np.zeros(self.layout.span, np.uint8)
        for place, parameter in zip(self.layout.slots, self.parameters, strict=True):
            self.layout.view(params, place.name)[...] = parameter.numpy()
        kept = [parameter._grad for parameter in self.parameters]
        zeros = np.zeros(self.layout.span, np.uint8)
        self._adopt(self._buffer(params), self._buffer(zeros), None)
        for parameter, slot, gradient in zip(self.parameters, self.slots, kept, strict=True):
            parameter._grad, parameter.slot = None, slot
            slot.assign(gradient)

    @classmethod
    def of(cls, parameters: Iterable[Parameter]) -> FlatSpace:
        """Return the flat space of parameters without names; they are named by their position."""
        return cls((str(index), parameter) for index, parameter in enumerate(parameters))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it as its parameters, which get a flat space in memory of their own."""
        places = {place.name: parameter for place, parameter in zip(self.layout.slots, self.parameters, strict=True)}
        return FlatSpace, ([(spec.name, places[spec.name]) for spec in self.layout.specs],)

    @classmethod
    def holding(cls, named_parameters: Iterable[tuple[str, Parameter]], outgrown: FlatSpace | None = None) -> FlatSpace:
        """Return the flat space of those parameters that are trainable, or have a place from when they were.

        It is the one they lie in, and a new one where they lie in none. Where some have become trainable since, it is
        a new one too, to which the others move; likewise from `outgrown`, whatever else that holds. Raises
        ArgumentError for parameters in several spaces, or in one with others that are trainable.
        """
        named = [(name, p) for name, p in named_parameters if p.requires_grad or _has_place(p)]
        ours, spaces = {id(p) for _, p in named}, {p.slot.space for _, p in named if _has_place(p)}
        if not spaces:
            return cls(named)
        space = spaces.pop()
        others = [p for p in space.parameters if id(p) not in ours]
        if spaces or (space is not outgrown and any(p.requires_grad for p in others)):
            raise ArgumentError("parameters: some are in a flat space with others; give all of a model's together")
        is_whole = all(_has_place(p) for _, p in named)
        if is_whole and (not others or space is not outgrown):
            return space
        space.release(p for _, p in named if _has_place(p))
        return cls(named)

    def release(self, parameters: Iterable[Parameter]) -> None:
        """Let parameters leave with their gradients; this flat space is of no use to them from now on."""
        for parameter in parameters:
            parameter.slot, parameter._grad = None, parameter.slot.release()

    def rename(self, named_parameters: Iterable[tuple[str, Parameter]]) -> None:
        """Give the slots the parameters' names; raises ArgumentError unless their order is the flat space's."""
        named = list(named_parameters)
        if [id(p) for _, p in reversed(named)] != [id(p) for p in self.parameters]:
            raise ArgumentError("parameters: they lie in a flat space in another order; give the module itself")
        self.layout = FlatLayout([ParameterSpec(name, p.shape) for name, p in named])

    @property
    def is_staged(self) -> bool:
        """Whether the device's memory is apart from the host arrays, so that pull_* and push_* copy."""
        return self._staged

    @property
    def current_grads(self) -> Any:
        """The buffer of the averaged gradients when all are, else `grads`; see complete_grads."""
        return self.reduced if all(slot.state == REDUCED for slot in self.slots) else self.grads

    # -- buffers

    def _buffer(self, array: np.ndarray, on_top: bool = False) -> Any:
        memory = self.device.memory
        return memory.exact(on_top_of=array) if on_top else memory.exact(copy_of=array)

    def _adopt(self, params: Any, grads: Any, reduced: Any) -> None:
        """Make the given buffers the flat ones and point parameters and gradients at them."""
        self.device.revision += 1
        self.params, self.grads = params, grads
        self.reduced = grads if reduced is None else reduced
        for place, parameter, slot in zip(self.layout.slots, self.parameters, self.slots, strict=True):
            parameter.buffer = params.get_sub_region(place.start, place.nbytes)
            slot.local = slot.reduced = self._view(grads, place)
            if reduced is not None:
                slot.reduced = self._view(reduced, place)

    def _view(self, buffer: Any, place: Any) -> Tensor:
        return wrap(self.device, buffer.get_sub_region(place.start, place.nbytes), place.shape)

    def rebind(self, params: np.ndarray, grads: np.ndarray, reduced: np.ndarray) -> None:
        """Move the flat space onto host arrays (uint8, `layout.span` bytes each), contents kept.

        Where the device shares the host's memory its buffers are made on top of the arrays. Elsewhere, and for arrays
        that are not aligned for that, the arrays are staging memory that pull_* and push_* copy through.
        """
        for name, array in (("params", params), ("grads", grads), ("reduced", reduced)):
            if array.dtype != np.uint8 or array.shape != (self.layout.span,) or not array.flags.c_contiguous:
                expected = f"{self.layout.span} contiguous uint8"
                raise ArgumentError(f"{name}: expected {expected}, got {array.dtype} of shape {array.shape}")
        self.device.read(self.params, params)
        gradients = np.zeros_like(grads)
        for place, slot in zip(self.layout.slots, self.slots, strict=True):
            if slot.state != NONE:
                current = slot.for_update()
                self.device.read(current.buffer, self.layout.view(gradients, place.name))
        self._host = {"params": params, "grads": grads, "reduced": reduced}
        on_top = self.device.shares_host_memory and self._aligned(params, grads, reduced) and self._lies_on(grads)
        grads[...] = gradients
        apart = on_top and reduced.ctypes.data != grads.ctypes.data  # a world of one has a single array for both
        third = self._buffer(reduced, on_top=True) if apart else None
        self._adopt(self._buffer(params, on_top), self._buffer(grads, on_top), third)
        self._staged = not on_top

    @staticmethod
    def _aligned(*arrays: np.ndarray) -> bool:
        return all(array.ctypes.data % HOST_POINTER_ALIGNMENT == 0 for array in arrays)

    def _lies_on(self, array: np.ndarray) -> bool:
        """Return whether a kernel's writes to a buffer on top of `array` are seen in it without a copy."""
        device, buffer = self.device, self._buffer(array, on_top=True)
        array[-4:] = 255
        count = array.nbytes // 4
        device.launch(device.kernel("elementwise", "fill"), *device.grid(count), buffer, 0.0, count)
        device.finish()
        return not array[-4:].any()

    # -- between device and host

    def pull_params(self) -> None:
        """Bring the host's `params` array up to date."""
        if self._staged:
            self.device.read(self.params, self._bound("params"))
        else:
            self.device.finish()

    def push_params(self) -> None:
        """Make the host's `params` array the device's parameters."""
        if self._staged:
            self.device.write(self.params, self._bound("params"))
        else:
            self.device.finish()

    def pull_grads(self, start: int, stop: int) -> None:
        """Bring bytes [start, stop) of the host's `grads` up to date; zeros where there is no gradient."""
        self.grad_moves(start, stop)[0]()

    def push_grads(self, start: int, stop: int) -> None:
        """Make bytes [start, stop) of the host's `reduced` the gradients of the parameters that end there."""
        self.grad_moves(start, stop)[1]()

    def grad_moves(self, start: int, stop: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return what `pull_grads` and `push_grads` of a range do, each to be called every time it is needed."""
        found = self._moves.get((start, stop))
        if found is None:
            pairs = zip(self.layout.slots, self.slots, strict=True)
            closing = [slot for place, slot in pairs if start < place.stop <= stop]
            pull, push = self._pull(self._opening(start, stop), start, stop), self._push(closing, start, stop)
            found = self._moves[start, stop] = pull, push
        return found

    def send_grads(self, start: int, stop: int, mark: QueueMark | None) -> None:
        """As `pull_grads`, as soon as `mark` is reached; until `push_grads` nothing may change these gradients."""
        opening = self._opening(start, stop)
        if mark is None or any(slot.state != LOCAL for slot in opening):
            self.pull_grads(start, stop)
        elif self._staged:
            mark.read(self.grads, self._bound("grads")[start:stop], start)
        else:
            mark.wait()
        for slot in opening:
            slot.state = SENT

    def pull_own_grads(self) -> tuple[str, ...]:
        """Bring this rank's own gradients up to date in the host's `grads`; return the names of their parameters."""
        own = [place for place, slot in zip(self.layout.slots, self.slots, strict=True) if slot.state == LOCAL]
        if self._staged:
            for place in own:
                self.device.read(self.grads, self._bound("grads")[place.start : place.stop], place.start)
        elif own:
            self.device.finish()
        return tuple([place.name for place in own])

    def push_own_grads(self, names: Collection[str]) -> None:
        """Make these parameters' gradients those in the host's `grads`."""
        self.note_states()
        for place, slot in zip(self.layout.slots, self.slots, strict=True):
            if place.name in names:
                if self._staged:
                    self.device.write(self.grads, self._bound("grads")[place.start : place.stop], place.start)
                slot.state = LOCAL

    def _opening(self, start: int, stop: int) -> list[GradSlot]:
        return [slot for place, slot in zip(self.layout.slots, self.slots, strict=True) if start <= place.start < stop]

    def _pull(self, opening: list[GradSlot], start: int, stop: int) -> Callable[[], None]:
        def pull() -> None:
            for slot in opening:
                if slot.state != LOCAL:
                    slot.make_own()
            if self._staged:
                self.device.read(self.grads, self._bound("grads")[start:stop], start)
            else:
                self.device.finish()

        return pull

    def _push(self, closing: list[GradSlot], start: int, stop: int) -> Callable[[], None]:
        def push() -> None:
            if self._staged:
                self.device.write(self.grads, self._bound("reduced")[start:stop], start)
            if self.device.recorder is not None:
                self.note_states()
            for slot in closing:
                slot.state = REDUCED

        return push

    def _bound(self, name: str) -> np.ndarray:
        if self._host is None:
            raise ArgumentError("FlatSpace: no host arrays yet; call rebind() first")
        return self._host[name]

    def complete_grads(self, slots: Sequence[GradSlot] | None = None) -> Any:
        """Return the buffer in which these gradients are whole, zeros where there is none; None: all of them.

        Averaged gradients and this rank's own are never mixed: unless all are averaged, all lie in `grads`. Nothing
        but a synchronisation writes to the averaged ones, which ranks may share.
        """
        slots = self.slots if slots is None else slots
        states = [slot.state for slot in slots]
        if states.count(REDUCED) == len(states):
            return self.reduced
        if states.count(LOCAL) != len(states):
            for slot in slots:
                slot.make_own()
        return self.grads

    def zero_grad(self) -> None:
        """Forget all gradients; nothing is written."""
        self.note_states()
        for slot in self.slots:
            if slot.state == SENT:
                slot.require_here()
            slot.state = NONE

    def note_states(self) -> None:
        """Tell a recording under way, if any, that states are about to change."""
        if self.device.recorder is not None:
            self.device.recorder.slots_used(self)


def _has_place(parameter: Tensor) -> bool:
    return isinstance(parameter, Parameter) and parameter.slot is not None


def _check(named: list[tuple[str, Parameter]]) -> None:
    if not named:
        raise ArgumentError("parameters: expected at least one trainable parameter, got none")
    if len({id(parameter) for _, parameter in named}) != len(named):
        raise ArgumentError("parameters: expected each one once, got one twice")
    for name, parameter in named:
        if not isinstance(parameter, Parameter):
            raise ArgumentError(f"parameter {name!r}: expected a Parameter, got {type(parameter).__name__}")
        if parameter.slot is not None:
            raise ArgumentError(f"parameter {name!r}: expected one without a flat space, it already is in one")
        if parameter.device is not named[0][1].device:
            raise ArgumentError(f"parameter {name!r}: expected all parameters on one device, it is on another")
