"""Parameter groups, as PyTorch's: parameters of one optimizer with hyper-parameters of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Parameter

#: The entry of a group with its parameters.
PARAMS = "params"
#: The argument that stands for two numbers.
_BETAS = "betas"


class Rules(Protocol):
    """The class of an optimizer, as far as its hyper-parameters are concerned."""

    def numbers_of(self, arguments: Mapping[str, object]) -> dict[str, float]:
        """Return an optimizer's arguments as numbers; ArgumentError for invalid ones."""

    def require_change(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Raise ArgumentError for hyper-parameters that a group cannot change to."""


class ParamGroup(MutableMapping[str, Any]):
    """A group's parameters, under "params", and its hyper-parameters by the names of the optimizer's arguments.

    These can be set at any time, the same on every rank.

    Args:
        rules: the optimizer's class.
        params: a Module, a Parameter, or an iterable of Parameters.
        arguments: the optimizer's.

    Attributes:
        numbers: the hyper-parameters, as kernels take them.
        initial_lr: the learning rate before the first scheduler; None: there was none.
    """

    initial_lr: float | None = None

    def __init__(self, rules: Rules, params: Module | Parameter | Iterable[Parameter], arguments: Mapping[str, object]):
        if not isinstance(params, Parameter):
            require_parameters(params)
        self._rules = rules
        self.given = params if isinstance(params, Module) else [params] if isinstance(params, Parameter) else [*params]
        for each in self.given if isinstance(self.given, list) else ():
            if not isinstance(each, Parameter):
                raise ArgumentError(
                    f"params: expected Parameters, got {type(each).__name__}; make them nn.Parameter(x)"
                )
        self.numbers = rules.numbers_of(arguments)

    def __copy__(self) -> ParamGroup:
        return ParamGroup(self._rules, self.given, self._arguments())

    def members(self) -> dict[str, Parameter]:
        """Return the parameters by name or, without names, by position."""
        if isinstance(self.given, Module):
            return dict(self.given.named_parameters())
        return {str(index): parameter for index, parameter in enumerate(self.given)}

    def _arguments(self) -> dict[str, object]:
        return {name: self[name] for name in self if name != PARAMS}

    def __getitem__(self, name: str) -> Any:
        if name == PARAMS:
            return list(self.members().values())
        if name == _BETAS and "beta1" in self.numbers:
            return self.numbers["beta1"], self.numbers["beta2"]
        return self.numbers[name]

    def __setitem__(self, name: str, value: object) -> None:
        if type(value) is float and self.numbers.get(name) == value:
            return  # a schedule sets the learning rate in each step
        if name == PARAMS or name not in self:
            raise unknown(name, [each for each in self if each != PARAMS])
        numbers = self._rules.numbers_of({**self._arguments(), name: value})
        self._rules.require_change(self.numbers, numbers)
        for each, number in numbers.items():
            if number != self.numbers[each]:  # a launch takes longer with another object, even an equal one
                self.numbers[each] = number

    def __delitem__(self, name: str) -> None:
        raise ArgumentError(f"param_groups: expected its entries to stay, got {name!r} to delete")

    def __iter__(self) -> Iterator[str]:
        yield PARAMS
        for name in self.numbers:
            if name not in ("beta1", "beta2"):
                yield name
            elif name == "beta1":
                yield _BETAS

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"ParamGroup({len(self.members())} parameters, {self._arguments()})"


def groups_of(rules: Rules, params: Any, defaults: Mapping[str, object]) -> list[ParamGroup]:
    """Return an optimizer's groups from its first argument; a dict stands for a group, defaults fill what it lacks."""
    if not isinstance(params, Parameter):
        require_parameters(params)
    given = params if isinstance(params, (Module, Parameter)) else list(params)
    if not isinstance(given, list) or not any(isinstance(each, Mapping) for each in given):
        return [ParamGroup(rules, given, defaults)]
    return [group_of(rules, each, defaults) for each in given]


def group_of(rules: Rules, given: object, defaults: Mapping[str, object]) -> ParamGroup:
    """Return a group from a dict of "params" and arguments; ArgumentError for anything else."""
    if not isinstance(given, Mapping) or PARAMS not in given:
        raise ArgumentError(f'params: expected dicts with "params" for all groups, got {type(given).__name__}')
    for name in given:
        if name != PARAMS and name not in defaults:
            raise unknown(name, defaults)
    return ParamGroup(rules, given[PARAMS], {**defaults, **{n: value for n, value in given.items() if n != PARAMS}})


def unknown(name: str, names: Iterable[str]) -> ArgumentError:
    """Return the error for a name that is no hyper-parameter."""
    return ArgumentError(f"param_groups: expected one of {', '.join(names)}, got {name!r}")


def members_of(groups: list[ParamGroup]) -> dict[str, Parameter]:
    """Return all groups' parameters by name, those of several groups by position; ArgumentError for one given twice."""
    if len(groups) == 1:
        return groups[0].members()
    everything = [parameter for group in groups for parameter in group.members().values()]
    if len({id(parameter) for parameter in everything}) != len(everything):
        raise ArgumentError("params: expected each parameter in one group, got one in two")
    return {str(index): parameter for index, parameter in enumerate(everything)}


# --- What an optimizer's hyper-parameters and the numbers in its state_dict may be. ---

#: The entry of a state_dict with the number of steps that each parameter missed.
MISSED = "missed"
#: That with each parameter's group, where there are several.
GROUPS = "groups"


def checked(name: str, value: float, below: float = math.inf) -> float:
    """Return a hyper-parameter as a float; ArgumentError outside [0, below)."""
    if not isinstance(value, (int, float, np.floating, np.integer)) or not 0.0 <= value < below:
        limit = "a number of at least 0" if below == math.inf else f"a number from 0 to below {below:g}"
        raise ArgumentError(f"{name}: expected {limit}, got {value!r}")
    return float(value)


def require_parameters(params: Any) -> None:
    """Raise ArgumentError for a class, a method that was not called, and for what cannot be iterated over."""
    if isinstance(params, type):
        raise ArgumentError(f"params: expected a model, got the class {params.__name__}; make one")
    if callable(params) and hasattr(params, "__func__"):
        raise ArgumentError(
            f"params: expected parameters, got the method {params.__name__}; call it: model.{params.__name__}()"
        )
    if not isinstance(params, (Module, Iterable)):
        raise ArgumentError(f"params: expected a Module or an iterable of Parameters, got {type(params).__name__}")


def require_numbers(state: Mapping[str, np.ndarray], names: Iterable[str]) -> None:
    """Raise ArgumentError for an entry that is more or less than one number."""
    for name in names:
        if np.shape(state[name]) != ():
            raise ArgumentError(f"state_dict[{name!r}]: expected one number, got {np.size(state[name])}")


def steps_of(state: Mapping[str, np.ndarray]) -> int:
    """Return the number of steps in a state_dict; ArgumentError for what is none."""
    steps = np.asarray(state["steps"])
    if steps.dtype.kind not in "iu" or steps < 0:
        raise ArgumentError(f"state_dict['steps']: expected a whole number of at least 0, got {steps}")
    return int(steps)


def hyper_parameter_of(state: Mapping[str, np.ndarray], name: str, below: float = math.inf) -> float:
    """Return a hyper-parameter in a state_dict; ArgumentError outside [0, below)."""
    array = np.asarray(state[name])
    value: Any = array.item() if array.dtype.kind in "fiu" else str(array)
    return checked(f"state_dict[{name!r}]", value, below)


def numbers_of_groups(
    state: Mapping[str, np.ndarray], own: Mapping[str, Any], limits: Mapping[str, float], switches: Iterable[str]
) -> list[dict[str, float]]:
    """Return each group's hyper-parameters in a state_dict; ArgumentError for invalid ones and for other groups.

    Args:
        state: with the entries of `own`.
        own: the optimizer's `settings()`.
        limits: what some hyper-parameters stay below.
        switches: those that are 0 or 1.
    """
    names = [name for name in own if name not in ("kind", "steps", GROUPS)]
    groups = [{name: state[name] for name in names}]
    if GROUPS in own:
        if np.asarray(state[GROUPS]).tolist() != own[GROUPS]:
            raise ArgumentError(
                f"state_dict[{GROUPS!r}]: expected those of this optimizer's parameters, got others; "
                "give it the groups of the job that saved it"
            )
        count = len(own["lr"])
        for name in names:
            if np.shape(state[name]) != (count,):
                raise ArgumentError(
                    f"state_dict[{name!r}]: expected {count} numbers, got shape {np.shape(state[name])}"
                )
        groups = [{name: state[name][at] for name in names} for at in range(count)]
    found = []
    for group in groups:
        require_numbers(group, names)
        found.append({name: hyper_parameter_of(group, name, limits.get(name, math.inf)) for name in names})
        for name in switches:
            if found[-1][name] not in (0.0, 1.0):
                raise ArgumentError(f"state_dict[{name!r}]: expected 0 or 1, got {found[-1][name]!r}")
    return found


def missed_steps_of(state: Mapping[str, np.ndarray], count: int) -> list[int]:
    """Return the steps that each of `count` parameters missed; ArgumentError for impossible numbers."""
    missed = np.asarray(state.get(MISSED, np.zeros(count, np.int64)))
    if missed.shape != (count,) or missed.dtype.kind not in "iu" or not (missed >= 0).all():
        raise ArgumentError(f"state_dict[{MISSED!r}]: expected {count} numbers of steps, got {missed}")
    if (missed > int(state["steps"])).any():
        raise ArgumentError(f"state_dict[{MISSED!r}]: expected at most {state['steps']} steps, got {missed.max()}")
    return [int(each) for each in missed]
