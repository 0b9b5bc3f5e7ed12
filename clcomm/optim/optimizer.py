"""The base of the optimizers: the parameters, their state in flat device buffers, and a step as a few launches.

Neighbouring parameters of one group and the same number of steps share a launch: without groups, as long as none is
frozen, that is one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, TypeAlias
from weakref import ref

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import FlatLayout, ShardPart, require_same_parameters
from clcomm.engine.flat import FlatSpace
from clcomm.engine.grad_slot import NONE
from clcomm.engine.modes import enable_grad
from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Parameter
from clcomm.optim.flat_state import ITEM, MASTER, FlatState, StateRun, in_order_of, order_of, runs_of
from clcomm.optim.groups import (
    GROUPS,
    MISSED,
    PARAMS,
    checked,
    group_of,
    groups_of,
    members_of,
    missed_steps_of,
    numbers_of_groups,
    require_numbers,
    steps_of,
)

#: What an optimizer trains: a dict has "params", and hyper-parameters of these parameters' own.
Params: TypeAlias = Module | Iterable[Parameter] | Iterable[Mapping[str, Any]]


class Optimizer:
    """Base of the optimizers: hyper-parameters, state in flat device buffers, and one kernel over the flat space.

    Parameters may be frozen and unfrozen between steps, as with PyTorch's optimizers: while one is frozen or has no
    gradient, its value, state and number of steps do not change. Optimizers may share parameters: each has a state of
    its own.

    Where the flat space stores parameters in 16 bits, the state has a master of each in float32. A step updates the
    masters, and rounds them to what is stored. A value that the program has stored becomes its master in the next step.

    Args:
        params: a Module, or an iterable of Parameters; or, as with PyTorch's, an iterable of dicts: each has such
            "params", and the hyper-parameters in which they differ.
        defaults: the hyper-parameters of groups that do not have their own.

    Attributes:
        param_groups: the groups, whose hyper-parameters can be set at any time; one without dicts.

    Raises:
        ArgumentError: a hyper-parameter outside its range; in a step, a Module whose parameters were replaced.
    """

    #: The hyper-parameters with an upper limit, which they stay below.
    _limits: ClassVar[Mapping[str, float]] = {}
    #: The hyper-parameters that are on or off: 1 or 0.
    _switches: tuple[str, ...] = ("maximize",)
    #: Those that a state has only where one is not 0: states that were written before there were these have none.
    _later: tuple[str, ...] = ("maximize",)

    def __init__(self, params: Params, **defaults: object):
        self._defaults = defaults
        self.param_groups = groups_of(type(self), params, defaults)
        self._members = members_of(self.param_groups)
        self.space = self._find_space()
        self.steps = 0
        self._missed: dict[Parameter, int] = {}  # steps taken while a parameter was frozen or had no gradient
        self._state = FlatState(self.space)
        self._checked_revision = -1  # the device's revision at the last _find_trained()
        self._runs: list[StateRun] | None = None  # those of a step; None: to be found

    @property
    def state_nbytes(self) -> int:
        """Bytes of optimizer state on this rank, masters included."""
        return len(self.state_names) * self._state.count * ITEM

    def restrict(self, start: int, stop: int) -> None:
        """Restrict the optimizer and its state to elements [start, stop) of the flat space.

        For callers that reduce gradients into that range themselves and call `update_range` instead of `step`. Raises
        ArgumentError after the first step, and for a range outside the flat space or off its alignment.
        """
        self.restrict_to([ShardPart(start, stop, 0)])

    def restrict_to(self, parts: Sequence[ShardPart]) -> None:
        """Restrict the optimizer to several parts of the flat space, in elements, as `restrict` does to one."""
        if self.steps or self._state.is_used:
            raise ArgumentError("range: expected to be chosen before the first step and before a state is loaded")
        self._state.restrict_to(parts)
        self._checked_revision = -1

    @property
    def lr(self) -> float:
        """The learning rate: that of the first group. Setting it sets those of all groups."""
        return self.param_groups[0].numbers["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = value

    def add_param_group(self, group: Mapping[str, object]) -> None:
        """Add a group, a dict as in `params`, whose steps begin now; the same on every rank.

        Raises ArgumentError for parameters of another group, and once the state is divided between ranks.
        """
        if not self._state.is_whole:
            raise ArgumentError("param_groups: expected all before the DistributedOptimizer is made, got another")
        groups = [*self.param_groups, group_of(type(self), group, self._defaults)]
        before, members = set(self._members.values()), members_of(groups)
        space = _space_of(members, self.space)
        self.param_groups, self._members = groups, members
        if space is not self.space:
            self._move(space)
        for parameter in set(members.values()) - before:
            self._missed[parameter] = self.steps
        self._checked_revision = -1

    def like_this(self, others: Mapping[Parameter, Parameter]) -> Optimizer:
        """Return an optimizer of this kind, with its groups, for others in place of its parameters.

        Raises ArgumentError after the first step.
        """
        if self.steps:
            raise ArgumentError(f"optimizer: expected one before its first step, got {self.steps} steps")
        groups = [{**group, PARAMS: [others[each] for each in group[PARAMS]]} for group in self.param_groups]
        return type(self)(groups, **self._defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop this optimizer's gradients; set_to_none=False: fill them with zeros."""
        if not set_to_none:
            for parameter in self._members.values():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        elif self._checked_revision == self.space.device.revision and self._has_all:
            self.space.zero_grad()
        else:  # unfreezing, and optimizers that share parameters, may have moved them
            for parameter in self._members.values():
                parameter.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with their gradients, the averaged ones after a synchronisation.

        closure: computes the loss and its gradients anew, before; the result is its own.
        """
        loss = None if closure is None else enable_grad()(closure)()
        if not self._state.is_whole or self.space.blocks is not None:
            raise ArgumentError("step: this optimizer updates a part of the parameters; step its DistributedOptimizer")
        self.space.device.on_host(self._step_trained)  # its arguments change from step to step
        return loss

    def _step_trained(self) -> None:
        self.space.require_classes()
        self._find_trained()
        there = [slot for slot in self._trained if slot.state != NONE]
        if there:
            pairs = zip(self._trained, self._updated, strict=True)
            missing = [] if len(there) == len(self._trained) else [each for slot, each in pairs if slot.state == NONE]
            self.update_range(self.space.complete_grads(there), missing=missing)

    def update_range(self, gradients: object, params: object = None, missing: Collection[Parameter] = ()) -> None:
        """Take a step on the optimizer's range, with buffers of that range's gradients and parameters.

        Args:
            gradients: a buffer.
            params: likewise; None: they are in the flat space.
            missing: the parameters without a gradient, which the step leaves alone.
        """
        self._find_trained()
        if self._runs is None or self._runs_without != frozenset(missing):
            self._find_runs(frozenset(missing))
        assert self._runs is not None
        self.steps += 1
        self._note_settings()
        device, state = self.space.device, self._state
        state.reconcile(params)
        for (first, count, missed, part, group), launch in zip(self._runs, self._launches, strict=True):
            hyper = self.param_groups[group].numbers
            name, arguments = self._kernel_call(hyper, self.steps - missed)
            kernel, own = device.kernel("optim", name), state.updated(part, params)
            launch(kernel, *device.grid(count), own, gradients, int(hyper["maximize"]), *arguments, first, count)
        state.narrow(params)
        for parameter in self._updated:
            if parameter not in self._runs_without:
                parameter.note_write()
        for parameter in (*self._frozen, *self._runs_without):
            self._missed[parameter] = self._missed.get(parameter, 0) + 1

    def _note_settings(self) -> None:
        numbers = [list(group.numbers.values()) for group in self.param_groups]
        if numbers != self.space.stepped_with.get(self):
            self.space.stepped_with[self] = numbers
            said = "; ".join(", ".join(f"{name} {number:g}" for name, number in each.items()) for each in self._numbers)
            self.space.new_settings[ref(self)] = f"{type(self).__name__} with {said}"

    # -- trained parameters

    @property
    def is_alone(self) -> bool:
        """Whether the flat space has no trainable parameters that are not this optimizer's."""
        ours = set(self._members.values())
        return not any(each.requires_grad for each in self.space.parameters if each not in ours)

    def current_space(self) -> FlatSpace:
        """Return the flat space that the parameters are in now: unfreezing some may have moved them."""
        self._find_trained()
        return self.space

    def _find_space(self) -> FlatSpace:
        given = self.param_groups[0].given
        module = given if len(self.param_groups) == 1 and isinstance(given, Module) else None
        if module is not None:
            module.require_registered()
        return _space_of(self._members, None, module)

    def _find_trained(self) -> None:
        """Determine the trained and frozen parameters, if they may have changed since the last step."""
        device = self.space.device
        if self._checked_revision == device.revision:
            return
        made_for = "the one that the optimizer was made for"
        require_same_parameters(
            members_of(self.param_groups), self._members, made_for, "make a new one after replacing a layer"
        )
        space = self._find_space()
        if space is not self.space:
            self._move(space)
        ours = set(self._members.values())
        pairs = [(slot, p) for slot, p in zip(space.slots, space.parameters, strict=True) if p in ours]
        self._trained = [slot for slot, parameter in pairs if parameter.requires_grad]
        self._updated = [parameter for _, parameter in pairs if parameter.requires_grad]
        self._frozen = [parameter for _, parameter in pairs if not parameter.requires_grad]
        self._runs = None
        self._has_all, self._checked_revision = self.is_alone, device.revision

    def _find_runs(self, missing: frozenset[Parameter]) -> None:
        groups = self._groups()
        stepped = {parameter: groups[parameter] for parameter in self._updated if parameter not in missing}
        self._runs, self._runs_without = runs_of(self._state, stepped, self._missed), missing
        self._launches = [self.space.device.repeated_launch() for _ in self._runs]

    def _groups(self) -> dict[Parameter, int]:
        """Return each parameter's group, by its position."""
        return {each: at for at, group in enumerate(self.param_groups) for each in group.members().values()}

    def _move(self, space: FlatSpace) -> None:
        """Move the state to another flat space, which has the same parameters and more."""
        if not self._state.is_whole:
            raise ArgumentError(
                "parameters: expected requires_grad to stay as it was when the DistributedOptimizer was made, got it "
                "changed; unfreeze before the module's first optimizer"
            )
        for parameter in set(self._members.values()) - set(self.space.parameters):
            self._missed[parameter] = self.steps
        self.space, self._state = space, self._state.moved_to(space)

    def _kernel_call(self, hyper: Mapping[str, float], steps: int) -> tuple[str, tuple[object, ...]]:
        """Return the kernel's name, and its arguments between direction and range, for step number `steps`.

        hyper: of the parameters' group.
        """
        raise TypeError(f"{type(self).__name__} defines no step")

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for copies and pickles, with the state on the host.

        A copy trains the same parameters with its own state; a deep copy also has its own parameters. Copied together
        with the model, it trains the copied model.
        """
        found_anew = ("_trained", "_updated", "_frozen", "_runs_without", "_launches", "_has_all")
        kept = {name: value for name, value in self.__dict__.items() if name not in found_anew}
        groups = [copy(group) for group in self.param_groups]
        own = {"param_groups": groups, "_missed": dict(self._missed), "_state": copy(self._state)}
        return {**kept, **own, "_checked_revision": -1, "_runs": None}

    # -- checkpoints

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the flat state buffers."""
        return (*self._buffer_names(self._numbers), *[MASTER] * (self.space.storage is not None))

    def settings(self) -> dict[str, Any]:
        """Return kind, number of steps and hyper-parameters by name.

        Of several groups there is a list of each, and "groups": each parameter's, in the flat space's order.
        """
        kind, numbers = {"kind": type(self).__name__, "steps": self.steps}, self._numbers
        names = [name for name in numbers[0] if name not in self._later or any(each[name] for each in numbers)]
        if len(numbers) == 1:
            return {**kind, **{name: numbers[0][name] for name in names}}
        groups = self._groups()
        return {
            **kind,
            **{name: [each[name] for each in numbers] for name in names},
            GROUPS: [groups.get(parameter, -1) for parameter in self.space.parameters],
        }

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return kind, number of steps, hyper-parameters (arrays without dimensions) and the flat state buffers.

        "names", "sizes" and "places" are the parameters', in the order of the buffers. So is "missed", if any: the
        steps in which each was frozen or had no gradient. After `restrict` the buffers are those of the range;
        `load_state_dict` takes whole ones.
        """
        state = {name: np.array(value) for name, value in self.settings().items()}
        missed = np.array([self._missed.get(parameter, 0) for parameter in self.space.parameters])
        if missed.any():
            state[MISSED] = missed
        return {**state, **self.order_in(self.space.layout), **self._state.read(self.state_names)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a `state_dict()`, of an optimizer whose flat space may have another order.

        Parameters are found by their names or, where an optimizer over a list had none, by their places in that list.
        Raises ArgumentError, with no change, if it is another optimizer's or holds what no `state_dict()` returns.
        """
        kind = str(state["kind"]) if "kind" in state else "none"
        if kind != type(self).__name__:
            raise ArgumentError(f"state_dict: expected the state of {type(self).__name__}, got {kind}")
        self._find_trained()  # unfrozen parameters have a place in the state
        off = np.zeros(len(self._numbers)) if len(self._numbers) > 1 else np.array(0.0)
        own, state = (
            {**dict.fromkeys(self._later, off), **self.settings()},
            {**dict.fromkeys(self._later, off), **state},
        )
        if self.space.storage is None:
            state.pop(MASTER, None)  # of a model in 16 bits: this one's parameters are its own
        else:
            state.setdefault(MASTER, np.zeros(self._state.span, np.float32))  # the next step takes what is stored
        expected = {*own, *self.order_in(self.space.layout), *self.state_names}
        if set(state) - {MISSED} != expected:
            raise ArgumentError(f"state_dict: expected the entries {sorted(expected)}, got {sorted(state)}")
        state = self.in_own_order(state, self.space.layout)
        require_numbers(state, ("steps",))
        steps, numbers = steps_of(state), numbers_of_groups(state, own, self._limits, self._switches)
        ours, theirs = list(self._buffer_names(self._numbers)), list(self._buffer_names(numbers))
        if ours != theirs:
            raise ArgumentError(
                f"state_dict: expected hyper-parameters with the buffers {ours}, got some with {theirs}"
            )
        missed = missed_steps_of(state, len(self.space.parameters))
        values = {name: self._state.own_values(name, state[name]) for name in self.state_names}
        for name in self.state_names:
            self._state.write(name, values[name])
        self.steps = steps
        for group, own in zip(self.param_groups, numbers, strict=True):
            group.numbers.update(own)
        self._missed = dict(zip(self.space.parameters, missed, strict=True))
        self._checked_revision = -1

    def in_own_order(self, state: Mapping[str, np.ndarray], layout: FlatLayout) -> dict[str, np.ndarray]:
        """Return another job's state in the order of this optimizer's parameters; ArgumentError for other parameters.

        layout: the flat space's, or that of the whole model of which it has parts.
        """
        return in_order_of(layout, self._places(), state, self.state_names)

    def order_in(self, layout: FlatLayout) -> dict[str, np.ndarray]:
        """Return the entries of a state that tell its order; layout: as for `in_own_order`."""
        return order_of(layout, self._places())

    def _places(self) -> list[int]:
        """Return each of the flat space's parameters' place among those that the optimizer was given, -1 for others."""
        places = {each: place for place, each in enumerate(self._members.values())}
        return [places.get(each, -1) for each in self.space.parameters]

    # -- hyper-parameters

    @property
    def _numbers(self) -> list[dict[str, float]]:
        return [group.numbers for group in self.param_groups]

    @classmethod
    def numbers_of(cls, arguments: Mapping[str, Any]) -> dict[str, float]:
        """Return an optimizer's arguments as numbers; ArgumentError for invalid ones."""
        numbers = {}
        for name, value in arguments.items():
            if name == "betas":
                if np.shape(value) != (2,):
                    raise ArgumentError(f"betas: expected two numbers, got {value!r}")
                for index, beta in enumerate(value):
                    name = f"beta{index + 1}"
                    numbers[name] = checked(f"betas[{index}]", beta, below=cls._limits[name])
            else:
                numbers[name] = checked(name, value)
        cls._buffers_for(numbers)
        return numbers

    @classmethod
    def require_change(cls, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Raise ArgumentError for hyper-parameters that a group cannot change to."""

    @classmethod
    def _buffer_names(cls, groups: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
        """Return the names of the state buffers that any of these groups needs."""
        return tuple(dict.fromkeys(name for hyper in groups for name in cls._buffers_for(hyper)))

    @classmethod
    def _buffers_for(cls, hyper: Mapping[str, float]) -> tuple[str, ...]:
        """Return the names of the state buffers for these hyper-parameters; ArgumentError for ones at odds."""
        return ()


def _space_of(members: Mapping[str, Parameter], outgrown: FlatSpace | None, module: Module | None = None) -> FlatSpace:
    """Return an optimizer's flat space: its module's, that of its parameters, or one that others share."""
    if FlatSpace.is_shared(members.values(), outgrown if module is None else module._flat_space):
        return FlatSpace.shared(members.items())
    return FlatSpace.holding(members.items(), outgrown) if module is None else module.flat_space()
