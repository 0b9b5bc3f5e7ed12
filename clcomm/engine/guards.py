"""The values that a function's code can reach by name: attributes, globals, closures, defaults, containers.

The search finds too much rather than too little: it follows every name in the code that runs on every object that can
be reached.
"""

from __future__ import annotations

import enum
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from clcomm.engine.nn.init import Generator
from clcomm.engine.nn.module import Module
from clcomm.engine.tensor import Tensor
from clcomm.engine.tensor_methods import comparing

#: Values that are compared by value and lead to no others.
PLAIN = (int, float, complex, str, bytes, type(None), range, slice, np.generic, np.dtype, enum.Enum, type(Ellipsis))
#: Attributes of a Module that change only together with others.
BOOKKEEPING = frozenset({"_parameters", "_buffers", "_transient", "_modules", "_flat_space"})
#: Code of these packages is not followed: its launches depend on its arguments alone. That of `exec` is of "builtins".
_FOREIGN = frozenset({"clcomm", "numpy", "pyopencl", "torch", *sys.stdlib_module_names}) - {"__main__", "builtins"}
#: Methods that may be called where their names are not in the code.
_UNNAMED = frozenset({"forward", "__call__"})
#: Larger containers are compared by length only, larger arrays not at all.
_MOST_ELEMENTS, _MOST_BYTES = 256, 4096


class Source(NamedTuple):
    """Reads a tuple of the values that `names` name, or a dict of all attributes of the object `names[0]`."""

    read: Callable[[], object]
    names: Sequence[str]


class ReachableValues:
    """The values that `roots` can reach by `names` and by the names in their own code.

    Args:
        roots: (name in messages, value) pairs.
        code: the code that runs; None: any.
        names: further names to follow.

    Attributes:
        followed: the code found; `names` has its names.
        sources: functions that read the values.
        generators: (name, function that reads the state) of random generators.
        unreadable: the first value found whose state cannot be read, if any.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, object]],
        code: frozenset[CodeType] | None,
        names: frozenset[str] = frozenset(),
    ):
        self.names = names
        self.followed: set[CodeType] = set()
        self._code = code
        self.sources: list[Source] = []
        self.generators: list[tuple[str, Callable[[], object]]] = []
        self.unreadable: str | None = None
        self._seen: dict[int, object] = {}  # by id; values are kept, so that no id is reused
        for name, value in roots:
            self._visit(name, value)

    def _visit(self, name: str, value: object) -> None:
        if id(value) in self._seen or isinstance(value, (*PLAIN, Tensor)):
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, (MethodType, BuiltinFunctionType)):
            self._visit(name, getattr(value, "__func__", None))
            self._visit(name, value.__self__)
        elif isinstance(value, partial):
            for part in (value.func, value.args, value.keywords):
                self._visit(name, part)
        elif isinstance(value, (list, tuple, set, frozenset, dict, deque)):
            self._visit_container(name, value)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _MOST_BYTES:
                self.sources.append(Source(value.tobytes, (name,)))
        elif hasattr(type(value), "__next__") or isinstance(value, random.SystemRandom):
            self.unreadable = self.unreadable or name
        elif isinstance(value, (np.random.Generator, np.random.RandomState, random.Random, Generator)):
            self.generators.append((name, _state_of(value)))
        elif isinstance(value, ModuleType):
            self._visit_mapping(name, vars(value), self.names, watch=not _is_foreign(value.__name__))
        elif isinstance(value, type):
            self._visit_class(name, value)
        else:
            self._visit_object(value)

    def _visit_function(self, function: FunctionType) -> None:
        if _is_foreign(function.__module__) or (self._code is not None and function.__code__ not in self._code):
            self._visit(function.__qualname__, getattr(function, "__wrapped__", None))  # a library's decorator has it
            return
        self.followed.add(function.__code__)
        names = _names_in(function.__code__)
        self.names |= names
        self._visit_mapping("the module", function.__globals__, names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.sources.append(Source(partial(_CONTENTS, cell), (name,)))
            self._visit(name, value)
        for values in (function.__defaults__, function.__kwdefaults__):
            self._visit(f"defaults of {function.__qualname__}", values)
        self._visit_mapping(function.__qualname__, function.__dict__, self.names)

    def _visit_container(self, name: str, value: Any) -> None:
        elements = value.items() if isinstance(value, dict) else value
        if not isinstance(value, (tuple, frozenset)):
            is_small = len(value) <= _MOST_ELEMENTS
            self.sources.append(Source(partial(tuple, elements) if is_small else value.__len__, (name,)))
        for _, element in zip(range(_MOST_ELEMENTS), tuple(elements), strict=False):
            self._visit(name, element)

    def _visit_mapping(self, owner: str, held: Mapping[str, object], names: Iterable[str], watch: bool = True) -> None:
        found = sorted(held.keys() & names)
        if found and watch:
            self.sources.append(Source(partial(itemgetter(*found), held), [f"{name} of {owner}" for name in found]))
        for name in found:
            self._visit(f"{name} of {owner}", held[name])

    def _visit_object(self, value: object) -> None:
        kind, owner = type(value), type(value).__name__
        held: dict[str, object] = getattr(value, "__dict__", {})
        if isinstance(value, Module):  # the engine's own code, which reads attributes too, is not followed
            self.sources.append(Source(partial(getattr, value, "__dict__"), (owner,)))
            self._visit_mapping(owner, held, held.keys() - BOOKKEEPING, watch=False)
        else:
            self._visit_mapping(owner, held, self.names)
        data = []
        for base in kind.__mro__:
            self._visit_code(base)
            data += [name for name in self._data_in(base) if name not in held and hasattr(value, name)]
        if data:
            found = sorted(set(data))
            self.sources.append(Source(partial(attrgetter(*found), value), [f"{name} of {owner}" for name in found]))
        for name in data:
            self._visit(f"{name} of {owner}", getattr(value, name, None))
        self._visit(owner, getattr(value, "__wrapped__", None))

    def _visit_class(self, name: str, kind: type) -> None:
        for base in kind.__mro__:
            self._visit_code(base)
            if not _is_foreign(base.__module__):
                self._visit_mapping(name, vars(base), self._data_in(base))

    def _visit_code(self, kind: type) -> None:
        """Follow the methods of a class; of properties of a foreign class only the names are taken."""
        for name in vars(kind).keys() & (self.names | _UNNAMED):
            attribute = vars(kind)[name]
            code = getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)
            if isinstance(attribute, property) and isinstance(code, FunctionType):
                self.names |= _names_in(code.__code__)
            if isinstance(code, FunctionType):
                self._visit(name, code)

    def _data_in(self, kind: type) -> list[str]:
        """Return the names in a class that are data: slots, and values that are not descriptors."""
        if _is_foreign(kind.__module__):
            return []
        named = vars(kind).keys() & self.names
        return [name for name in named if _is_data(vars(kind)[name])]


@contextmanager
def noting_code(ran: set[CodeType]) -> Iterator[bool]:
    """Add the code that this thread runs in the block, except foreign code; False where a profiler is set."""
    if sys.getprofile() is not None:
        yield False
        return

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and not _is_foreign(frame.f_globals.get("__name__")):
            ran.add(frame.f_code)

    sys.setprofile(note)
    try:
        yield True
    finally:
        sys.setprofile(None)


_CONTENTS = attrgetter("cell_contents")


def _is_data(attribute: object) -> bool:
    return isinstance(attribute, MemberDescriptorType) or not hasattr(type(attribute), "__get__")


def _is_foreign(module: str | None) -> bool:
    return (module or "builtins").partition(".")[0] in _FOREIGN


def _names_in(code: CodeType) -> frozenset[str]:
    """Return the globals and attributes that code names, including nested functions."""
    nested = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*nested)


def _state_of(generator: Any) -> Callable[[], object]:
    """Return a function that reads a random generator's state."""
    if isinstance(generator, random.Random):
        return generator.getstate
    if isinstance(generator, np.random.Generator):
        return partial(getattr, generator.bit_generator, "state")
    engine = generator._engine if isinstance(generator, Generator) else generator
    return engine.get_state


# --- Guards: the Python values, besides its arguments, that a recorded function's launches may depend on. ---

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
