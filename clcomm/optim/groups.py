"""Parameter groups, as PyTorch's: parameters of one optimizer with hyper-parameters of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol

from clcomm.base.errors import ArgumentError
from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Parameter
from clcomm.optim.checks import require_parameters

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
