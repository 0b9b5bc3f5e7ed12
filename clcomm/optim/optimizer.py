"""The base of the optimizers: the parameters, their state in flat device buffers, and a step as a few launches.

Neighbouring parameters with the same number of steps share a launch: as long as none is frozen, that is one launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar

import numpy as np

from clcomm.adapters.trainable import require_same_parameters
from clcomm.engine.flat import FlatSpace, space_of
from clcomm.engine.grad_slot import NONE
from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Parameter
from clcomm.errors import ArgumentError
from clcomm.flat_space.shards import Part
from clcomm.optim.checks import (
    MISSED,
    checked,
    hyper_parameter_of,
    missed_steps_of,
    require_numbers,
    require_parameters,
    steps_of,
)
from clcomm.optim.flat_state import ITEM, MASTER, FlatState
from clcomm.optim.runs import runs_of


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
        require_parameters(params)
        self._params_given = params if isinstance(params, Module) else list(params)
        self._members = self._named_members()
        self.space = self._find_space()
        self._hyper = {name: float(value) for name, value in hyper.items()}
        self.lr = lr
        self.steps = 0
        self._missed: dict[Parameter, int] = {}  # steps taken while a parameter was frozen
        self._state = FlatState(self.space)
        self._checked_revision = -1  # the device's revision at the last _find_trained()

    @property
    def state_nbytes(self) -> int:
        """Bytes of optimizer state on this rank, masters included."""
        return len(self.state_names) * self._state.count * ITEM

    def restrict(self, start: int, stop: int) -> None:
        """Restrict the optimizer and its state to elements [start, stop) of the flat space.

        For callers that reduce gradients into that range themselves and call `update_range` instead of `step`. Raises
        ArgumentError after the first step, and for a range outside the flat space or off its alignment.
        """
        self.restrict_to([Part(start, stop, 0)])

    def restrict_to(self, parts: Sequence[Part]) -> None:
        """Restrict the optimizer to several parts of the flat space, in elements, as `restrict` does to one."""
        if self.steps or self._state.is_used:
            raise ArgumentError("range: expected to be chosen before the first step and before a state is loaded")
        self._state.restrict_to(parts)
        self._checked_revision = -1

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
        if not self._state.is_whole or self.space.blocks is not None:
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
        device, state = self.space.device, self._state
        state.reconcile(params)
        for (first, count, missed, part), launch in zip(self._runs, self._launches, strict=True):
            name, arguments = self._kernel_call(self.steps - missed)
            kernel, own = device.kernel("optim", name), state.updated(part, params)
            launch(kernel, *device.grid(count), own, gradients, *arguments, first, count)
        state.narrow(params)
        for parameter in self._frozen:
            self._missed[parameter] = self._missed.get(parameter, 0) + 1

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
        trained = {parameter for _, parameter in pairs if parameter.requires_grad}
        self._runs = runs_of(self._state, trained, self._missed)
        self._launches = [device.repeated_launch() for _ in self._runs]
        self._checked_revision = device.revision

    def _move(self, space: FlatSpace) -> None:
        """Move the state to another flat space, which has the same parameters and more."""
        if not self._state.is_whole:
            raise ArgumentError(
                "parameters: expected requires_grad to stay as it was when the DistributedOptimizer was made, got it "
                "changed; unfreeze before the module's first optimizer"
            )
        for parameter in set(space.parameters) - set(self.space.parameters):
            self._missed[parameter] = self.steps
        self.space, self._state = space, self._state.moved_to(space)

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
        own = {"_hyper": dict(self._hyper), "_missed": dict(self._missed), "_state": copy(self._state)}
        return {**kept, **own, "_checked_revision": -1}

    # -- checkpoints

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the flat state buffers."""
        return (*self._buffer_names, *[MASTER] * (self.space.storage is not None))

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
            state[MISSED] = missed
        return {**state, **self._state.read(self.state_names)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a `state_dict()`.

        Raises ArgumentError, with no change, if it is another optimizer's or holds what no `state_dict()` returns.
        """
        kind = str(state["kind"]) if "kind" in state else "none"
        if kind != type(self).__name__:
            raise ArgumentError(f"state_dict: expected the state of {type(self).__name__}, got {kind}")
        self._find_trained()  # unfrozen parameters have a place in the state
        expected = {"kind", "steps", "lr", *self._hyper, *self.state_names}
        if set(state) - {MISSED} != expected:
            raise ArgumentError(f"state_dict: expected the entries {sorted(expected)}, got {sorted(state)}")
        require_numbers(state, ("steps", "lr", *self._hyper))
        steps, lr, hyper = steps_of(state), hyper_parameter_of(state, "lr"), self._hyper_of(state)
        missed = missed_steps_of(state, len(self.space.parameters))
        values = {name: self._state.own_values(name, state[name]) for name in self.state_names}
        for name in self.state_names:
            self._state.write(name, values[name])
        self.steps, self.lr, self._hyper = steps, lr, hyper
        self._missed = dict(zip(self.space.parameters, missed, strict=True))
        self._checked_revision = -1

    def _hyper_of(self, state: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the hyper-parameters in a state_dict; ArgumentError for invalid ones."""
        hyper = {name: hyper_parameter_of(state, name, self._limits.get(name, math.inf)) for name in self._hyper}
        for name in self._switches:
            if hyper[name] not in (0.0, 1.0):
                raise ArgumentError(f"state_dict[{name!r}]: expected 0 or 1, got {hyper[name]!r}")
        own, theirs = list(self._buffer_names), list(self._buffers_for(hyper))
        if own != theirs:
            raise ArgumentError(f"state_dict: expected hyper-parameters with the buffers {own}, got some with {theirs}")
        return hyper

    def _buffers_for(self, hyper: Mapping[str, float]) -> tuple[str, ...]:
        """Return the names of the state buffers for these hyper-parameters; ArgumentError for ones at odds."""
        return self._buffer_names
