"""Types of numbers, flags and words that callers give to public functions, checked by the functions' signatures."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops.names import PYTORCH_NAMES
from clcomm.engine.tensor import Tensor

#: The scalars that an annotation may name, and what is none; a parameter with another name is not checked.
_SCALARS, _OTHERS = {"bool", "int", "float", "str", "None"}, {"Tensor", "np.ndarray", "tuple", "Sequence", "list"}
_TYPES = {"bool": bool, "int": int, "float": float, "str": str, "None": type(None), "Tensor": Tensor, "other": tuple}


class _Wanted(NamedTuple):
    """A parameter's name, what it takes in words and as kinds, None for all, and types that need no second look."""

    name: str
    takes: str
    kinds: frozenset[str] | None
    types: frozenset[type]

    def refuse(self, function: str, value: Any) -> None:
        """Raise ArgumentError unless the value is of one of the kinds."""
        kind = _kind_of(value)
        if self.kinds is not None and kind not in self.kinds:
            given = type(value).__name__ if kind in ("Tensor", "other") else repr(value)
            raise ArgumentError(f"{function}: {self.name}: expected {self.takes}, got {given}")


def typed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that raises ArgumentError for scalars that its signature does not have.

    A flag is no number, as in PyTorch, where `x.sum(0, 1)` is an error. Tensors are the function's own affair: one
    that takes nothing but tensors, or tensors and numbers, is returned itself.
    """
    wanted = {each.name: (each.kind, _wanted(each)) for each in inspect.signature(function).parameters.values()}
    kinds = inspect.Parameter
    places = [own for kind, own in wanted.values() if kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    rest = next((own for kind, own in wanted.values() if kind is kinds.VAR_POSITIONAL), None)
    named_ones = {own.name: own for _, own in wanted.values() if own.kinds}
    if not named_ones:
        return function
    named_ones |= {theirs: named_ones[ours] for theirs, ours in PYTORCH_NAMES.items() if ours in named_ones}
    first, count = next((at for at, own in enumerate(places) if own.kinds), len(places)), len(places)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        for value, own in zip(args[first:], places[first:], strict=False):
            if type(value) not in own.types:
                own.refuse(name, value)
        for value in args[count:]:
            if rest is not None and type(value) not in rest.types:
                rest.refuse(name, value)
        for key, value in named.items():
            found = named_ones.get(key)
            if found is not None and type(value) not in found.types:
                found.refuse(name, value)
        return function(*args, **named)

    return call


def _wanted(parameter: inspect.Parameter) -> _Wanted:
    names = [part.strip() for part in re.sub(r"\[[^]]*\]+", "", str(parameter.annotation)).split("|")]
    found = {name.removeprefix("builtins.") for name in names}
    if not found & (_SCALARS - {"None"}) or found - _SCALARS - _OTHERS or {"Tensor", "float"} <= found:
        return _Wanted(parameter.name, "", None, frozenset())
    kinds = {name if name in _TYPES else "other" for name in found} | ({"int"} if "float" in found else set())
    takes = " or ".join(sorted(found | kinds - {"other"}))
    return _Wanted(parameter.name, takes, frozenset(kinds), frozenset(_TYPES[kind] for kind in kinds))


def _kind_of(value: Any) -> str:
    if value is None or isinstance(value, (bool, np.bool_)):
        return "None" if value is None else "bool"
    if isinstance(value, (str, Tensor)):
        return "str" if isinstance(value, str) else "Tensor"
    return "int" if isinstance(value, Integral) else "float" if isinstance(value, Real) else "other"
