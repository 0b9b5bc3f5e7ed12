"""A rank's code as a graph of its steps: what it does next, after each result that a step can have.

The code is the project's own. Where it reads or writes what ranks share, or calls the system, it calls `ask`, which
takes the results of the steps before, and stops the code at the first step without one. So code runs in this thread
alone, from its beginning for each new result, and depends on nothing but those results. Courses that lead to the same
place in the code, with the same variables, go on from one node. Python's variables do not show what an expression has
computed in part, as `f(a()) + f(b())` between its two calls: code that does so with steps needs whole courses.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

#: A step: its kind, then its operands.
Op = tuple[Any, ...]
#: Steps without a result of interest, and the last ones.
SILENT, LAST = frozenset(("write", "fence")), frozenset(("end", "failed"))
#: Variables that only count polls, of which the code may do any number.
COUNTS = frozenset(("polls", "_polls", "polled"))
#: More steps in a row than any code has.
MOST_STEPS = 4000


class Stop(BaseException):
    """The code has come to a step without a result."""


class _Run:
    """One run of a rank's code: the results of its steps, and the steps beyond them with the code's state at each."""

    def __init__(self, results: list[Hashable], knows: Callable[[Hashable], bool], whole: bool):
        self._results, self._at, self._knows, self._whole = results, 0, knows, whole
        self.beyond: list[tuple[Op, Hashable]] = []
        self.is_stopped = False

    def ask(self, op: Op) -> Any:
        if self.is_stopped:
            raise Stop  # a `finally` of the code that was stopped
        if self._at < len(self._results):
            self._at += 1
            return self._results[self._at - 1]
        state = (tuple(self._results), len(self.beyond)) if self._whole else _state_of(sys._getframe(2))
        key = op, state
        self.beyond.append((op, key))
        if op[0] in SILENT and not self._knows(key):
            assert len(self.beyond) < MOST_STEPS, f"a loop without an end: {op}"
            return None
        self.is_stopped = True
        raise Stop


_runs: list[_Run] = []


def ask(*op: Any) -> Any:
    """Do a step of the running code, and return its result."""
    return _runs[-1].ask(op)


class Course:
    """The graph of a program's steps; a node is a step that is to be done, 0 the first.

    whole: whether all results until a node set it apart from others.
    """

    def __init__(self, name: str, program: Callable[[], Hashable], whole: bool = False):
        self.name, self._program, self._whole = name, program, whole
        self.ops: list[Op] = []
        self._before: list[tuple[int, Hashable]] = []
        self._after: list[dict[Hashable, int]] = []
        self._known: dict[Hashable, int] = {}
        #: How many results are known of all steps.
        self.edges = 0
        self._grow(-1, None)

    def after(self, node: int, result: Hashable) -> int:
        """Return the node after this one had a result."""
        found = self._after[node].get(result)
        return self._grow(node, result) if found is None else found

    def _grow(self, node: int, result: Hashable) -> int:
        results: list[Hashable] = []
        at, last = node, result
        while at >= 0:
            results.append(last)
            at, last = self._before[at]
        run = _Run(results[::-1], self._known.__contains__, self._whole)
        _runs.append(run)
        end: Op = ()
        try:
            end = ("end", self._program())
        except Stop:
            pass
        except Exception as error:
            end = ("failed", f"{type(error).__name__}: {error}")
        finally:
            _runs.pop()
        steps = run.beyond if run.is_stopped else [*run.beyond, (end, end)]
        at, first = node, -1
        for op, key in steps:
            at = self._add(at, result, op, key)
            first, result = (at if first < 0 else first), None
        return first

    def _add(self, node: int, result: Hashable, op: Op, key: Hashable) -> int:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(self.ops)
            self.ops.append(op)
            self._before.append((node, result))
            self._after.append({})
        if node >= 0:
            self.edges += result not in self._after[node]
            self._after[node][result] = found
        return found

    def afters(self, node: int) -> list[int]:
        """Return the nodes that are known to come after this one."""
        return list(self._after[node].values())


def _state_of(frame: FrameType | None) -> Hashable:
    """Return the state of the running code: the place and the variables of each call, down to the program's."""
    seen: dict[int, int] = {}
    places = []
    while frame is not None and frame.f_code is not Course._grow.__code__:
        values = {name: _told(name, value, seen) for name, value in frame.f_locals.items()}
        places.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lasti, tuple(values.items())))
        frame = frame.f_back
    return tuple(places)


def _told(name: str, value: Any, seen: dict[int, int]) -> Hashable:
    """Return what sets a value apart from others, whichever objects it is made of."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, type)):
        return 0 if name in COUNTS else value
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, np.ndarray):
        told = getattr(value, "offsets", None)
        return tuple(told()) if told is not None else value.tobytes()
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return type(value).__name__, *(_told("", each, seen) for each in value)
    if isinstance(value, dict):
        return "dict", *((_told("", key, seen), _told("", each, seen)) for key, each in value.items())
    if isinstance(value, partial):
        return "partial", _told("", value.func, seen), _told("", value.args, seen)
    if hasattr(value, "__self__") and not hasattr(value, "__dict__"):
        return value.__name__, _told("", value.__self__, seen)
    if isinstance(value, memoryview):
        return value.tobytes()
    fields = (
        getattr(value, "__dict__", None) if type(value).__module__.startswith(("clcomm", "tests", "training")) else None
    )
    if fields is None:
        return type(value).__name__
    return type(value).__name__, *((field, _told(field, each, seen)) for field, each in fields.items())
