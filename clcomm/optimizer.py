"""The base of the optimizers: the parameters, their state in flat device buffers, and a step as a few launches.

Neighbouring parameters with the same number of steps share a launch: as long as none is frozen, that is one launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from clcomm.adapters.trainable import require_same_parameters
from clcomm.engine.flat import FlatSpace, space_of
from clcomm.engine.grad_slot import NONE
from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Parameter
from clcomm.errors import ArgumentError
from clcomm.flat_space.shards import Part

#: Bytes of an element: parameters and state are float32.
_ITEM = 4
#: The entry of a state with the number of steps that each parameter missed.
_MISSED = "missed"
#: The state buffer with the parameters in float32, where 16 bits are stored.
_MASTER = "master"


class Optimizer:
    """Base of the optimizers: hyper-parameters, state in flat device buffers, and one kernel over the flat space.

    Parameters may be frozen and unfrozen between steps, as with PyTorch's optimizers: while one is frozen, its value,
    state and number of steps do not change.

    Where the flat space stores parameters in 16 bits, the state has a master of each in float32. A step updates the
    masters, and rounds them to what is stored. A value that the program has stored becomes its master in the next step.

    Args:
        params: a Module, or an iterable of Parameters that share a flat space or have none yet.
        lr: the learning rate, which can be set at any time.

    Raises:
        ArgumentError: a hyper-parameter outside its range; in a step, a Module whose parameters were replaced.
    """

    #: Names of the state buffers for these hyper-parameters.
    _buffer_names: tuple[str, ...] = ()
    #: The hyper-parameters with an upper limit, which they stay below.
    _limits: ClassVar[Mapping[str, float]] = {}
    #: The hyper-parameters that are on or off: 1 or 0.
    _switches: tuple[str, ...] = ()
    _lr = math.nan  # none is set yet

    def __init__(self, params: Module | Iterable[Parameter], lr: float, **hyper: float):
        self._params_given = params if isinstance(params, Module) else list(params)
        self._members = self._named_members()
        self.space = self._find_space()
        self._hyper = {name: float(value) for name, value in hyper.items()}
        self.lr = lr
        self.steps = 0
        self._missed: dict[Parameter, int] = {}  # steps taken while a parameter was frozen
        self._parts: tuple[Part, ...] = (Part(0, self._span, 0),)  # in elements
        self._count = self._span  # of elements in each state buffer
        self._views: tuple[Any, list[Any]] = (None, [])  # buffer of all parameters, and a view of it for each part
        self._checked_revision = -1  # the device's revision at the last _find_trained()

    @property
    def _span(self) -> int:
        return self.space.layout.span // _ITEM

    @property
    def _is_whole(self) -> bool:
        return self._parts == (Part(0, self._span, 0),)

    @cached_property
    def _state(self) -> dict[str, Any]:
        """The state buffers, filled with zeros; made at the first use, which comes after `restrict`."""
        return {name: self._zeros() for name in self.state_names}

    def _zeros(self) -> Any:
        zeros = np.zeros(max(self._count, 1), np.float32)  # no OpenCL buffer is empty
        return self.space.device.upload(zeros)

    @property
    def state_nbytes(self) -> int:
        """Bytes of optimizer state on this rank, masters included."""
        return len(self.state_names) * self._count * _ITEM

    def restrict(self, start: int, stop: int) -> None:
        """Restrict the optimizer and its state to elements [start, stop) of the flat space.

        For callers that reduce gradients into that range themselves and call `update_range` instead of `step`. Raises
        ArgumentError after the first step, and for a range outside the flat space or off its alignment.
        """
        self.restrict_to([Part(start, stop, 0)])

    def restrict_to(self, parts: Sequence[Part]) -> None:
        """Restrict the optimizer to several parts of the flat space, in elements, as `restrict` does to one."""
        multiple = self.space.layout.alignment // _ITEM
        for start, stop, offset in parts:
            if not 0 <= start <= stop <= self._span or any(value % multiple for value in (start, stop, offset)):
                raise ArgumentError(
                    f"range: expected multiples of {multiple} within [0, {self._span}], got [{start}, {stop})"
                )
        if "_state" in self.__dict__:
            raise ArgumentError("range: expected to be chosen before the first step and before a state is loaded")
        self._parts = tuple(parts)
        self._count = max([offset + stop - start for start, stop, offset in parts], default=0)
        self._views, self._checked_revision = (None, []), -1

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        found = checked("lr", value)
        if found != self._lr:  # a launch takes longer with another object, even an equal one
            self._lr = found

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.space.zero_grad()
        if self._checked_revision != self.space.device.revision:  # unfreezing may have moved parameters
            for space in {space for p in self._members.values() if (space := space_of(p))}:
                space.zero_grad()

    def step(self) -> None:
        """Update the parameters with their gradients, the averaged ones after a synchronisation."""
        if not self._is_whole or self.space.blocks is not None:
            raise ArgumentError("step: this optimizer updates a part of the parameters; step its DistributedOptimizer")
        self.space.device.on_host(self._step_trained)  # its arguments change from step to step

    def _step_trained(self) -> None:
        self._find_trained()
        if any(slot.state != NONE for slot in self._trained):
            self.update_range(self.space.complete_grads(self._trained))

    def update_range(self, gradients: Any, params: Any = None) -> None:
        """Take a step on the optimizer's range, with buffers of that range's gradients and parameters.

        params: None: they are in the flat space.
        """
        self._find_trained()
        self.steps += 1
        storage = self.space.storage
        if storage is not None:
            self._for_stored(storage.reconcile, params)
        device = self.space.device
        for (first, count, missed, part), launch in zip(self._runs, self._launches, strict=True):
            name, arguments = self._kernel_call(self.steps - missed)
            kernel, own = device.kernel("optim", name), self._updated(part, params)
            launch(kernel, *device.grid(count), own, gradients, *arguments, first, count)
        if storage is not None:
            self._for_stored(storage.narrow, params)
        for parameter in self._frozen:
            self._missed[parameter] = self._missed.get(parameter, 0) + 1

    def _updated(self, part: int, params: Any) -> Any:
        """Return the buffer of float32 in which a part is updated: its masters, where 16 bits are stored."""
        if self.space.storage is not None:
            return self._state[_MASTER]
        return self._view(part) if params is None else params

    def _for_stored(self, move: Callable[[Any, Any, int, int, int], None], params: Any) -> None:
        """Call `move` of a Storage with each part of what is stored, and its masters."""
        masters = self._state.get(_MASTER)
        if masters is None:  # parameters were stored in 16 bits after the first use of the state
            masters = self._state[_MASTER] = self._zeros()
        for start, stop, offset in self._parts:
            if params is None:
                move(self.space.params, masters, start, offset, stop - start)
            else:
                move(params, masters, offset, offset, stop - start)

    # -- trained parameters

    def _named_members(self) -> dict[str, Parameter]:
        """Return the optimizer's parameters by name or, without names, by position."""
        if isinstance(self._params_given, Module):
            return dict(self._params_given.named_parameters())
        return {str(index): parameter for index, parameter in enumerate(self._params_given)}

    def _find_space(self) -> FlatSpace:
        if isinstance(self._params_given, Module):
            return self._params_given.flat_space()
        return FlatSpace.holding(self._members.items())

    def _find_trained(self) -> None:
        """Determine the trained and frozen parameters, if they may have changed since the last step."""
        device = self.space.device
        if self._checked_revision == device.revision:
            return
        made_for = "the one that the optimizer was made for"
        require_same_parameters(
            self._named_members(), self._members, made_for, "make a new one after replacing a layer"
        )
        space = self._find_space()
        if space is not self.space:
            self._move(space)
        ours = set(self._members.values())
        pairs = [(slot, p) for slot, p in zip(space.slots, space.parameters, strict=True) if p in ours]
        self._trained = [slot for slot, parameter in pairs if parameter.requires_grad]
        self._frozen = [parameter for _, parameter in pairs if not parameter.requires_grad]
        self._find_runs(ours)
        self._checked_revision = device.revision

    def _find_runs(self, ours: set[Parameter]) -> None:
        """Divide the optimizer's range into runs (first, count, steps missed, part) of parameters that share a launch.

        `first` is an element of the state, `part` an index.
        """
        self._runs: list[tuple[int, int, int, int]] = []
        places, span = self.space.layout.ranges, self._span
        ends = [*(place.start // _ITEM for place in places[1:]), span]
        for index, (start, stop, offset) in enumerate(self._parts):
            for place, end, parameter in zip(places, ends, self.space.parameters, strict=True):
                first, last = max(place.start // _ITEM, start), min(end, stop)
                if first < last and parameter.requires_grad and parameter in ours:
                    missed = self._missed.get(parameter, 0)
                    self._add_run(first - start + offset, last - first, missed, index)
        self._launches = [self.space.device.repeated_launch() for _ in self._runs]

    def _add_run(self, first: int, count: int, missed: int, part: int) -> None:
        """Add a run, to the one before it where that adjoins and is alike."""
        if self._runs and sum(self._runs[-1][:2]) == first and self._runs[-1][2:] == (missed, part):
            first, before, *_ = self._runs.pop()
            count += before
        self._runs.append((first, count, missed, part))

    def _move(self, space: FlatSpace) -> None:
        """Move the state to another flat space, which has the same parameters and more."""
        if not self._is_whole:
            raise ArgumentError(
                "parameters: expected requires_grad to stay as it was when the DistributedOptimizer was made, got it "
                "changed; unfreeze before the module's first optimizer"
            )
        old, state = self.space, self._read_state() if "_state" in self.__dict__ else {}
        self.space = space
        self._parts, self._count = (Part(0, self._span, 0),), self._span
        places = dict(zip(old.parameters, old.layout.ranges, strict=True))
        for name, values in state.items():
            moved = np.zeros(self._span, np.float32)
            for parameter, place in zip(space.parameters, space.layout.ranges, strict=True):
                if parameter in places:
                    begin = places[parameter].start // _ITEM
                    moved[place.start // _ITEM :][: parameter.size] = values[begin : begin + parameter.size]
            self._state[name] = space.device.upload(moved)
        for parameter in space.parameters:
            if parameter not in places:
                self._missed[parameter] = self.steps

    def _view(self, part: int) -> Any:
        """Return the parameters as a buffer in which a part lies where it lies in the state."""
        whole, views = self._views
        if whole is not self.space.params:
            whole, views = self.space.params, [self.space.params]
            if not self._is_whole:
                views = [
                    whole.get_sub_region((start - offset) * _ITEM, (offset + stop - start) * _ITEM)
                    for start, stop, offset in self._parts
                    if start < stop
                ]
            self._views = whole, views
        return views[part]

    def _kernel_call(self, steps: int) -> tuple[str, tuple[Any, ...]]:
        """Return the kernel's name, and its arguments between gradients and range, for step number `steps`."""
        raise TypeError(f"{type(self).__name__} defines no step")

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for copies and pickles, with the state on the host.

        A copy trains the same parameters with its own state; a deep copy also has its own parameters. Copied together
        with the model, it trains the copied model.
        """
        found_anew = ("_trained", "_frozen", "_runs", "_launches")
        kept = {name: value for name, value in self.__dict__.items() if name not in found_anew}
        kept |= {"_hyper": dict(self._hyper), "_missed": dict(self._missed), "_views": (None, [])}
        if "_state" in kept:
            kept["_state"] = self._read_state()
        return {**kept, "_checked_revision": -1}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_state" in state:
            padded = {
                name: values if values.size else np.zeros(1, np.float32) for name, values in state["_state"].items()
            }
            self._state = {name: self.space.device.upload(values) for name, values in padded.items()}

    # -- checkpoints

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the flat state buffers."""
        return (*self._buffer_names, *[_MASTER] * (self.space.storage is not None))

    def settings(self) -> dict[str, Any]:
        """Return kind, number of steps and hyper-parameters by name."""
        return {"kind": type(self).__name__, "steps": self.steps, "lr": self._lr, **self._hyper}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return kind, number of steps, hyper-parameters (arrays without dimensions) and the flat state buffers.

        "missed", if any: for each parameter, in the flat space's order, the steps in which it was frozen. After
        `restrict` the buffers are those of the range; `load_state_dict` takes whole ones.
        """
        state = {name: np.array(value) for name, value in self.settings().items()}
        missed = np.array([self._missed.get(parameter, 0) for parameter in self.space.parameters])
        if missed.any():
            state[_MISSED] = missed
        return {**state, **self._read_state()}

    def _read_state(self) -> dict[str, np.ndarray]:
        state = {name: np.empty(self._count, np.float32) for name in self._state}
        for name, buffer in self._state.items():
            if self._count:
                self.space.device.read(buffer, state[name])
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a `state_dict()`.

        Raises ArgumentError, with no change, if it is another optimizer's or holds what no `state_dict()` returns.
        """
        kind = str(state["kind"]) if "kind" in state else "none"
        if kind != type(self).__name__:
            raise ArgumentError(f"state_dict: expected the state of {type(self).__name__}, got {kind}")
        self._find_trained()  # unfrozen parameters have a place in the state
        expected = {"kind", "steps", "lr", *self._hyper, *self._state}
        if set(state) - {_MISSED} != expected:
            raise ArgumentError(f"state_dict: expected the entries {sorted(expected)}, got {sorted(state)}")
        steps, lr, hyper = self._numbers_of(state)
        missed = _missed_steps(state, len(self.space.parameters))
        values = {name: self._own_values(name, state[name]) for name in self._state}
        for name, buffer in self._state.items():
            if self._count:
                self.space.device.write(buffer, values[name])
        self.steps, self.lr, self._hyper = steps, lr, hyper
        self._missed = dict(zip(self.space.parameters, missed, strict=True))
        self._checked_revision = -1

    def _numbers_of(self, state: Mapping[str, np.ndarray]) -> tuple[int, float, dict[str, float]]:
        """Return steps, learning rate and hyper-parameters of a state; ArgumentError for invalid ones."""
        for name in ("steps", "lr", *self._hyper):
            if np.shape(state[name]) != ():
                raise ArgumentError(f"state_dict[{name!r}]: expected one number, got {np.size(state[name])}")
        steps = np.asarray(state["steps"])
        if steps.dtype.kind not in "iu" or steps < 0:
            raise ArgumentError(f"state_dict['steps']: expected a whole number of at least 0, got {steps}")
        lr = _hyper_parameter(state, "lr", math.inf)
        hyper = {name: _hyper_parameter(state, name, self._limits.get(name, math.inf)) for name in self._hyper}
        for name in self._switches:
            if hyper[name] not in (0.0, 1.0):
                raise ArgumentError(f"state_dict[{name!r}]: expected 0 or 1, got {hyper[name]!r}")
        own, theirs = list(self._buffer_names), list(self._buffers_for(hyper))
        if own != theirs:
            raise ArgumentError(f"state_dict: expected hyper-parameters with the buffers {own}, got some with {theirs}")
        return int(steps), lr, hyper

    def _buffers_for(self, hyper: Mapping[str, float]) -> tuple[str, ...]:
        """Return the names of the state buffers for these hyper-parameters; ArgumentError for ones at odds."""
        return self._buffer_names

    def _own_values(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return the optimizer's range of a state buffer as float32; ArgumentError for what is not the flat space's."""
        array = np.asarray(values)
        if array.shape != (self._span,):
            raise ArgumentError(f"state_dict[{name!r}]: expected {self._span} values, got {array.shape}")
        if array.dtype.kind not in "fiu":
            raise ArgumentError(f"state_dict[{name!r}]: expected numbers, got {array.dtype}")
        own = np.zeros(self._count, np.float32)
        for start, stop, offset in self._parts:
            own[offset : offset + stop - start] = array[start:stop]
        return own


def _hyper_parameter(state: Mapping[str, np.ndarray], name: str, below: float) -> float:
    """Return a hyper-parameter of a state; ArgumentError outside [0, below)."""
    array = np.asarray(state[name])
    value: Any = array.item() if array.dtype.kind in "fiu" else str(array)
    return checked(f"state_dict[{name!r}]", value, below)


def _missed_steps(state: Mapping[str, np.ndarray], count: int) -> list[int]:
    """Return the steps that each of `count` parameters missed, from a state; ArgumentError for invalid numbers."""
    missed = np.asarray(state.get(_MISSED, np.zeros(count, np.int64)))
    if missed.shape != (count,) or missed.dtype.kind not in "iu" or not (missed >= 0).all():
        raise ArgumentError(f"state_dict[{_MISSED!r}]: expected {count} numbers of steps, got {missed}")
    if (missed > int(state["steps"])).any():
        raise ArgumentError(f"state_dict[{_MISSED!r}]: expected at most {state['steps']} steps, got {missed.max()}")
    return missed.tolist()


def checked(name: str, value: float, below: float = math.inf) -> float:
    """Return a hyper-parameter as a float; ArgumentError outside [0, below)."""
    if not isinstance(value, (int, float, np.floating, np.integer)) or not 0.0 <= value < below:
        limit = "a number of at least 0" if below == math.inf else f"a number from 0 to below {below:g}"
        raise ArgumentError(f"{name}: expected {limit}, got {value!r}")
    return float(value)
