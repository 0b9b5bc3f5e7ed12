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
