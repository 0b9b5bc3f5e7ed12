"""The Python values around a recorded function: what its launches were chosen by, beside its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import numpy as np

from clcomm.engine.reach import BOOKKEEPING, PLAIN, Reach

_MISSING = object()


class Surroundings:
    """Values that `function`, called with `args`, can reach by name, noted so that they can be compared later.

    code: what runs in such a call, as `noting_code` says; None: not known. followed: what of it can be reached. unseen:
    what it can reach that cannot be compared, if anything.
    """

    def __init__(self, function: Callable[..., Any], args: Iterable[Any], code: frozenset[CodeType] | None):
        roots = [("the function", function), *((f"argument {index}", arg) for index, arg in enumerate(args))]
        reach, names = Reach(roots, code), frozenset[str]()
        while reach.names != names:  # code that was found late may name attributes of what was found before
            names = reach.names
            reach = Reach(roots, code, names)
        self.followed, self.unseen = reach.followed, reach.unseen
        self._sources = reach.sources
        self._reads = [source.read for source in reach.sources]
        self._values = [_pinned(read()) for read in self._reads]
        self._generators = [(name, read, _bits(read())) for name, read in reach.generators]

    def are_same(self) -> bool:
        """Return whether the values, random generators aside, are those of when this was made."""
        try:
            return [read() for read in self._reads] == self._values
        except Exception:  # an attribute that has gone, or values that refuse to be compared
            return False

    def change(self) -> str | None:
        """Return the name of the first value that is not what it was when this was made; None where all are."""
        for source, before in zip(self._sources, self._values, strict=True):
            name = _difference(source.read, before, source.names)
            if name is not None:
                return name
        return next((f"the state of {name}" for name, read, bits in self._generators if _bits(read()) != bits), None)


def _difference(read: Callable[[], Any], before: Any, names: Any) -> str | None:
    try:
        now = read()
        if now == before:
            return None
        if isinstance(now, dict):
            keys = (key for key in {**before, **now} if now.get(key, _MISSING) != before.get(key, _MISSING))
            return f"{next(keys)} of {names[0]}"
        if isinstance(now, tuple) and len(now) == len(before) == len(names):
            return next(name for name, one, other in zip(names, now, before, strict=True) if one != other)
    except Exception:  # as in are_same
        pass
    return str(names[0])


class _Same:
    """Equals one object alone, whatever else that object is equal to."""

    __array_ufunc__ = None  # NumPy leaves the comparison to this class
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return other is self._value


def _pinned(value: Any) -> Any:
    """Return what only the same values are equal to: numbers and the like by value, containers by identity."""
    if type(value) is tuple:
        return tuple(map(_pinned, value))
    if type(value) is dict:  # a module's attributes
        return {name: each if name in BOOKKEEPING else _pinned_element(each) for name, each in value.items()}
    return _pinned_element(value)


def _pinned_element(value: Any) -> Any:
    if type(value) is tuple:
        return _pinned(value)
    return value if isinstance(value, PLAIN) or type(value).__eq__ is object.__eq__ else _Same(value)


def _bits(state: Any) -> str:
    with np.printoptions(threshold=1 << 20):
        return repr(state)
