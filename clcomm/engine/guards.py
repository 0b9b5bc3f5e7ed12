"""Guards: the Python values, besides its arguments, that a recorded function's launches may depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any

import numpy as np

from clcomm.engine.reachable import BOOKKEEPING, PLAIN, ReachableValues
from clcomm.engine.tensor import Tensor
from clcomm.engine.tensor_operators import comparing

_MISSING = object()
_BY_IDENTITY: object = object.__eq__


class Guards:
    """Values that `function`, called with `args`, can reach by name, kept to be compared later.

    Args:
        code: the code that runs in such a call, from `noting_code`; None: not known.

    Attributes:
        followed: the part of that code that can be reached.
        unreadable: the first reachable value that cannot be compared, if any.
    """

    def __init__(self, function: Callable[..., object], args: Iterable[object], code: frozenset[CodeType] | None):
        roots = [("the function", function), *((f"argument {index}", arg) for index, arg in enumerate(args))]
        reachable, names = ReachableValues(roots, code), frozenset[str]()
        while reachable.names != names:  # code found late may name attributes of values found before
            names = reachable.names
            reachable = ReachableValues(roots, code, names)
        self.followed, self.unreadable = reachable.followed, reachable.unreadable
        self._sources = reachable.sources
        self._reads = [source.read for source in reachable.sources]
        self._values = [_comparable(read()) for read in self._reads]
        self._generators = [(name, read, _bits(read())) for name, read in reachable.generators]

    def are_same(self) -> bool:
        """Return whether the values, other than states of random generators, are unchanged."""
        comparing.by_identity = True
        try:
            return [read() for read in self._reads] == self._values
        except Exception:  # an attribute was deleted, or values cannot be compared
            return False
        finally:
            comparing.by_identity = False

    def change(self) -> str | None:
        """Return the name of the first value that has changed; None where none has."""
        for source, before in zip(self._sources, self._values, strict=True):
            name = _difference(source.read, before, source.names)
            if name is not None:
                return name
        return next((f"the state of {name}" for name, read, bits in self._generators if _bits(read()) != bits), None)


def _difference(read: Callable[[], Any], before: Any, names: Sequence[str]) -> str | None:
    """Return the name of the first value that is no longer as `before`; None if there is none."""
    try:
        now = read()
        if not _differs(now, before):
            return None
        if isinstance(now, dict):
            keys = (key for key in {**before, **now} if _differs(now.get(key, _MISSING), before.get(key, _MISSING)))
            return f"{next(keys)} of {names[0]}"
        if isinstance(now, tuple) and len(now) == len(before) == len(names):
            return next(name for name, one, other in zip(names, now, before, strict=True) if _differs(one, other))
    except Exception:  # as in are_same
        pass
    return str(names[0])


def _differs(now: object, before: object) -> bool:
    """Return whether a value is another one; tensors are where they are not the same."""
    comparing.by_identity = True
    try:
        return bool(now != before)
    finally:
        comparing.by_identity = False


class _Identical:
    """Compares equal to one object only, by identity."""

    __array_ufunc__ = None  # NumPy leaves the comparison to this class
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: object):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return other is self._value


def _comparable(value: object) -> object:
    """Return a value for later comparisons: plain values compare by value, others by identity.

    Of tuples and of a module's attributes the elements are compared.
    """
    if type(value) is tuple:
        return tuple(map(_comparable, value))
    if type(value) is dict:  # a module's attributes
        return {name: each if name in BOOKKEEPING else _comparable_element(each) for name, each in value.items()}
    return _comparable_element(value)


def _comparable_element(value: object) -> object:
    if type(value) is tuple:
        return _comparable(value)
    is_as_it_is = isinstance(value, (*PLAIN, Tensor)) or type(value).__eq__ is _BY_IDENTITY
    return value if is_as_it_is else _Identical(value)


def _bits(state: object) -> str:
    with np.printoptions(threshold=1 << 20):
        return repr(state)
