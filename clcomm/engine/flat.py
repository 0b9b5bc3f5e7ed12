"""The flat space: every trainable parameter and its gradient have one place in flat buffers of one layout.

Kernels write gradients directly into `grads`. After a synchronisation the averaged gradients lie in `reduced`: on a
device that shares the host's memory that is a third array, which several ranks may read and the engine never writes; on
a discrete device it is `grads` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import FlatLayout, Unit
from clcomm.base.flat_space.parameters import FLOAT32, ParameterRange, ParameterSpec, Precision
from clcomm.engine.flat_buffers import FlatBuffers, GradMoves
from clcomm.engine.grad_slot import LOCAL, NONE, REDUCED, SENT, GradBlocks, GradSlot
from clcomm.engine.parameter import GatheredParameter, GatheredUnits, Parameter, Storage, StoredParameter
from clcomm.engine.tensor import Tensor, copy_into, empty, wrap
from clcomm.engine.tensor_methods import require_none_noted

if TYPE_CHECKING:
    import pyopencl as cl


class FlatSpace(FlatBuffers):
    """Parameters and gradients of a model in flat buffers; `layout` has the place of each.

    The parameters become views of `params`. Padding is zero. Raises ArgumentError for parameters on several devices,
    for no parameters, and for parameters that are in a flat space already.

    Args:
        precision: of the stored parameters; see `store_in`.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Parameter]], precision: Precision = FLOAT32):
        named = list(named_parameters)
        _check(named)
        layout, by_name = FlatLayout([ParameterSpec(name, p.shape) for name, p in named]), dict(named)
        params = np.zeros(layout.span, np.uint8)
        for name, parameter in named:
            layout.view(params, name)[...] = parameter.numpy()
        super().__init__(named[0][1].device, layout, params)
        self.parameters = [by_name[place.name] for place in layout.ranges]
        self.slots = tuple([GradSlot(self) for _ in self.parameters])
        #: The gradients' memory where this rank keeps a shard of them alone; None: they lie in `grads`.
        self.blocks: GradBlocks | None = None
        #: The parameters' memory where this rank keeps a shard of them alone; None: they lie in `params`.
        self.gathered: GatheredUnits | None = None
        #: Whether a step is to average the gradients, which are complete until the next backward; see `GradSlot`.
        self.step_averages = False
        #: Whether the ranks that average the gradients have devices of one family, whose kernels compute the same bits.
        self.has_alike_devices = True
        #: The hyper-parameters of optimizers' last steps, and by references to them in words those not compared yet.
        self.stepped_with, self.new_settings = WeakKeyDictionary[object, list[list[float]]](), dict[object, str]()
        self._on_drop: Callable[[Sequence[str]], None] | None = None
        #: Gradients' way between the device and the host.
        self.moves = GradMoves(self, self.slots)
        kept = [parameter._grad for parameter in self.parameters]
        self._attach()
        for parameter, slot, gradient in zip(self.parameters, self.slots, kept, strict=True):
            parameter._grad, parameter.slot = None, slot
            slot.assign(gradient)
        self.store_in(precision)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the parameters, so that a copy gets a new flat space."""
        places = {place.name: parameter for place, parameter in zip(self.layout.ranges, self.parameters, strict=True)}
        return FlatSpace, ([(spec.name, places[spec.name]) for spec in self.layout.specs], self.precision)

    @classmethod
    def holding(cls, named_parameters: Iterable[tuple[str, Parameter]], outgrown: FlatSpace | None = None) -> FlatSpace:
        """Return the flat space of the parameters that are trainable or were when they got a place.

        That is the one they lie in, or a new one if they have none. If some have become trainable since, the parameters
        move to a new one.

        Args:
            named_parameters: (name, parameter) pairs in the module's order.
            outgrown: a flat space that the parameters may leave even if it holds other trainable ones.

        Raises:
            ArgumentError: for parameters in several spaces, and in one other than `outgrown` with other trainable
                parameters.
        """
        named = [(name, p) for name, p in named_parameters if p.requires_grad or space_of(p)]
        placed = [(p, space) for _, p in named if (space := space_of(p))]
        ours, spaces = {id(p) for _, p in named}, {space for _, space in placed}
        if not spaces:
            return cls(named)
        space = spaces.pop()
        others = [p for p in space.parameters if id(p) not in ours]
        if spaces or (space is not outgrown and any(p.requires_grad for p in others)):
            raise ArgumentError("parameters: some are in a flat space with others; give all of a model's together")
        if len(placed) == len(named) and (not others or space is not outgrown):
            return space
        space.release(p for p, _ in placed)
        return cls(named)

    @classmethod
    def is_shared(cls, parameters: Iterable[Parameter], outgrown: FlatSpace | None = None) -> bool:
        """Return whether these lie in several flat spaces, or in one, but `outgrown`, with other trainable ones."""
        ours = {id(parameter): space for parameter in parameters if (space := space_of(parameter))}
        spaces = {*ours.values()}
        if len(spaces) != 1:
            return len(spaces) > 1
        (space,) = spaces
        return space is not outgrown and any(p.requires_grad and id(p) not in ours for p in space.parameters)

    @classmethod
    def shared(cls, named_parameters: Iterable[tuple[str, Parameter]]) -> FlatSpace:
        """Return a flat space of these parameters, in which others may lie: that of an optimizer.

        All parameters of flat spaces in which some of these lie move to one. Where there are others, names begin with
        the number of the space before, until a module that has all gives them its own. Raises ArgumentError where
        `release` would, and where a space's memory was given to a Communicator or to other devices.
        """
        named = [(name, p) for name, p in named_parameters if p.requires_grad or space_of(p)]
        spaces = list(dict.fromkeys(space for _, p in named if (space := space_of(p))))
        new = [(name, p) for name, p in named if space_of(p) is None]
        if len(spaces) == 1 and not new:
            return spaces[0]
        everything = [
            (f"{number}.{place.name}", parameter)
            for number, space in enumerate(spaces)
            for place, parameter in reversed([*zip(space.layout.ranges, space.parameters, strict=True)])
        ] + [(f"{len(spaces)}.{name}", parameter) for name, parameter in new]
        if len(everything) == len(named):
            everything = named
        if len({parameter.device for _, parameter in everything}) > 1:
            raise ArgumentError("parameters: expected all of an optimizer's on one device, they are on several")
        for space in spaces:
            space._require_movable()
            if space._host is not None:  # which a Synchronizer or other devices go on using
                raise ArgumentError(
                    "parameters: expected an optimizer of several models before their memory is shared, got it after "
                    "that; make it before broadcast_parameters(model), or of one module that has them all"
                )
        for space in spaces:
            space.release(space.parameters)
        return cls(everything)

    def _require_movable(self) -> None:
        """Raise ArgumentError where parameters cannot leave this flat space."""
        self._refuse_move()
        if self.storage is not None:
            raise ArgumentError(
                f"model: expected its trainable parameters to stay the same once they are stored in {self.precision}; "
                "freeze or unfreeze before"
            )
        for slot in self.slots:
            slot.require_not_sent()

    def release(self, parameters: Iterable[Parameter]) -> None:
        """Detach parameters, which keep their values and gradients, from this flat space."""
        self._require_movable()
        for parameter in parameters:
            if parameter.slot is not None:
                parameter._grad = parameter.slot.release()
                parameter.slot = None

    def rename(self, named_parameters: Iterable[tuple[str, Parameter]]) -> None:
        """Rename the parameters in the layout, whose order stays; raises ArgumentError for other parameters."""
        names = {id(parameter): name for name, parameter in named_parameters}
        if names.keys() != {id(parameter) for parameter in self.parameters}:
            raise ArgumentError("parameters: some are in a flat space with others; give all of a model's together")
        self.layout = FlatLayout([ParameterSpec(names[id(p)], p.shape) for p in reversed(self.parameters)])

    # -- buffers

    def _attach(self) -> None:
        self.device.revision += 1
        for place, parameter, slot in zip(self.layout.ranges, self.parameters, self.slots, strict=True):
            if self.storage is None:
                written_at = parameter.written_at
                parameter.buffer = self.params.get_sub_region(place.start, place.nbytes)
                parameter.buffer.written_at = written_at
            slot.local = slot.reduced = self._view(self.grads, place)
            if self.reduced is not self.grads:
                slot.reduced = self._view(self.reduced, place)

    def _view(self, buffer: cl.Buffer, place: ParameterRange) -> Tensor:
        return wrap(self.device, buffer.get_sub_region(place.start, place.nbytes), place.shape)

    def rebind(self, params: np.ndarray, grads: np.ndarray, reduced: np.ndarray) -> None:
        """Move the flat space, with its contents, onto host arrays (uint8, `layout.span` bytes each).

        Of parameters stored in 16 bits the array has `params_nbytes`.

        If the device shares the host's memory its buffers lie on top of the arrays. Otherwise, and for arrays that are
        not aligned, the arrays are staging memory that moves copy to and from. Raises ArgumentError for
        arrays of another dtype or size.
        """
        self._refuse_move()
        for name, array in (("params", params), ("grads", grads), ("reduced", reduced)):
            self._check_host_array(name, array, self.params_nbytes if name == "params" else self.layout.span)
        self.device.read(self.params, params)
        gradients = np.zeros_like(grads)
        for place, slot in zip(self.layout.ranges, self.slots, strict=True):
            if slot.state != NONE:
                current = slot.for_update()
                self.device.read(current.buffer, self.layout.view(gradients, place.name))
        self._bind(params, grads, reduced, gradients)
        self._attach()

    def push_params(self) -> None:
        """Make the host's `params` array the device's parameters, all of which that writes."""
        super().push_params()
        self.note_write()

    def note_write(self) -> None:
        """Note that all parameters have changed; see `Tensor.note_write`."""
        for parameter in self.parameters:
            parameter.note_write()

    # -- precision

    def store_in(self, precision: Precision) -> None:
        """Store the parameters, rounded to nearest, in this precision; kernels compute with float32 copies of them.

        Each use of a parameter queues a kernel that makes the copy. Raises ArgumentError for fp16 on a device without
        half precision, and for a second precision or one that comes after the memory was given to a Communicator.
        """
        if precision is self.precision:
            return
        if self.storage is not None or self._host is not None:
            raise ArgumentError(
                f"precision: expected {self.precision}, in which the parameters are stored already, got {precision}; "
                "make another model"
            )
        storage, values = Storage(self.device, precision), self.params
        self.params = self.device.memory.exact(precision.nbytes(self.layout.span))
        storage.narrow(self.params, values, 0, 0, self.layout.span // 4)
        self.precision, self.storage = precision, storage
        self._places = dict(zip(self.parameters, self.layout.ranges, strict=True))
        for parameter in self.parameters:
            parameter.buffer = None
            parameter.__class__ = StoredParameter
        self.device.revision += 1

    def expanded(self, parameter: Parameter) -> cl.Buffer:
        """Return a buffer with a stored parameter's values as float32."""
        assert self.storage is not None
        values = self.device.allocate(parameter.nbytes)
        self.storage.expand(self.params, values, self._places[parameter].start // 4, parameter.numel())
        return values

    def narrow(self, parameter: Parameter, values: np.ndarray) -> None:
        """Store a parameter's values, float32; waits for the queue."""
        assert self.storage is not None
        given = self.device.upload(np.ascontiguousarray(values, np.float32))
        self.storage.narrow(self.params, given, self._places[parameter].start // 4, 0, parameter.numel())
        self.device.finish()

    # -- shards

    def shard_gradients(self, units: Sequence[Unit], on_drop: Callable[[Sequence[str]], None]) -> GradBlocks:
        """Release the arrays of gradients: from now on these exist in blocks of memory that units share in turn.

        Args:
            on_drop: called with the names of parameters whose gradients the program drops.

        Raises ArgumentError where there are gradients.
        """
        self._refuse_move()
        if any(slot.state != NONE for slot in self.slots):
            raise ArgumentError("gradients: expected none when they are to be sharded; call zero_grad() before")
        self.device.finish()
        self.blocks, self._on_drop = GradBlocks(self.device, units, self.slots), on_drop
        self.grads = self.reduced = None
        self.moves.forget()
        self._drop_host_arrays("grads", "reduced")
        self.device.revision += 1
        return self.blocks

    def shard_parameters(self, gathered: GatheredUnits) -> None:
        """Release the array of parameters: from now on `gathered` has each while it is in use."""
        self.device.finish()
        self.gathered, self.params = gathered, None
        self._drop_host_arrays("params")
        for parameter in self.parameters:
            if self.storage is None:
                parameter.buffer = None
            parameter.__class__ = GatheredParameter
        self.device.revision += 1

    def _refuse_move(self) -> None:
        if self.blocks is not None:
            raise ArgumentError(
                "model: expected its trainable parameters and its Synchronizer to stay the same once its gradients "
                "are sharded; make another model"
            )

    def open(self, slot: GradSlot) -> None:
        if self.blocks is not None:
            self.blocks.open(slot)

    def is_averaged(self, parameter: Parameter) -> bool:
        """Return whether a parameter has a gradient that ranks have averaged."""
        return parameter.slot is not None and parameter.slot.state == REDUCED

    def note_dropped(self, slot: GradSlot) -> None:
        if self._on_drop is not None:
            self._on_drop([self.layout.ranges[self.slots.index(slot)].name])

    def complete_grads(self, slots: Sequence[GradSlot] | None = None) -> Any:
        """Return the buffer that holds the gradients of `slots`, by default of all; missing ones are filled with zeros.

        That is `reduced` if all are averaged, else `grads`, to which averaged ones are copied: only a synchronisation
        writes to `reduced`, which ranks may share.
        """
        if self.blocks is not None:
            raise ArgumentError("step: this model's gradients are sharded; step its DistributedOptimizer")
        slots = self.slots if slots is None else slots
        states = [slot.state for slot in slots]
        if states.count(REDUCED) == len(states):
            return self.reduced
        if states.count(LOCAL) != len(states):
            for slot in slots:
                slot.make_own()
        return self.grads

    def require_classes(self) -> None:
        """Raise ArgumentError for gradients of a target outside the classes; waits where only the device knows."""
        if self.device.in_doubt:
            require_none_noted(self.device)

    def zero_grad(self) -> None:
        """Drop all gradients, without writing to their memory."""
        self.note_states()
        for slot in self.slots:
            if slot.state == SENT:
                slot.require_not_sent()
            slot.drop()
        if self._on_drop is not None:
            self._on_drop([place.name for place in self.layout.ranges])

    def take_gradients(self) -> list[tuple[GradSlot, Tensor]]:
        """Return copies of the gradients that there are, and drop these."""
        taken = []
        for slot in self.slots:
            if slot.state != NONE:
                own = slot.for_update()
                taken.append((slot, copied := empty(self.device, own.shape)))
                copy_into(copied, own)
                slot.drop()
        return taken

    def drop_sent(self) -> None:
        """Drop the gradients whose all-reduce is in flight, after the loss of its ranks."""
        for slot in self.slots:
            if slot.state == SENT:
                slot.drop()

    def note_states(self) -> None:
        self.step_averages = False
        self.moves.note_states()


def space_of(parameter: Tensor) -> FlatSpace | None:
    """Return the flat space in which a tensor has a place; None if it has none."""
    space = parameter.slot.space if isinstance(parameter, Parameter) and parameter.slot is not None else None
    return space if isinstance(space, FlatSpace) else None


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
