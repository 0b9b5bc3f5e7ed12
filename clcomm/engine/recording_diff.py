"""The first difference between two recordings of a function, launch by launch."""

from __future__ import annotations

from clcomm.engine.recorder import Allocation, InputIndex, RecordedLaunch, Segment
from clcomm.engine.recording import LaunchRecording

# --- The first difference between two recordings of a function, launch by launch. ---


def first_difference(recorded: LaunchRecording, now: LaunchRecording) -> str | None:
    """Return a description of the first difference from a recording to a later one of the same function; None: none.

    Memory allocated in the runs differs each time: it counts as the same if all launches use it in the same places.
    """
    roles = _Roles(recorded.constants, now.constants)
    count = 0
    for before, after in zip(recorded.segments, now.segments, strict=False):
        for first, second in zip(before.launches, after.launches, strict=False):
            count += 1
            found = _of_launches(roles, first, second)
            if found is not None:
                return f"launch {count} {found}"
        found = _of_ends(before, after, count)
        if found is not None:
            return found
    hooks_before, hooks_now = len(recorded.segments) - 1, len(now.segments) - 1
    if hooks_before != hooks_now:
        return f"it ran {hooks_before} hooks and functions on the host, and runs {hooks_now} now"
    if len(recorded.results) != len(now.results):
        return f"it returned {len(recorded.results)} tensors, and returns {len(now.results)} now"
    for index, (before_result, after_result) in enumerate(zip(recorded.results, now.results, strict=True)):
        if before_result[:2] != after_result[:2] or not roles.are_alike(before_result[2], after_result[2]):
            return f"result {index} is another tensor"
    return None


def _of_launches(roles: _Roles, before: RecordedLaunch, after: RecordedLaunch) -> str | None:
    name, new_name = before.kernel.function_name, after.kernel.function_name
    if name != new_name:
        return f"was {name} and is {new_name} now"
    if before.kernel is not after.kernel:
        return f"({name}) was built with other options"
    if before.sizes != after.sizes:
        return f"({name}) was of size {before.sizes[0]} and is of {after.sizes[0]} now"
    for index, (one, other) in enumerate(zip(before.args, after.args, strict=True)):
        if not roles.are_alike(one, other):
            is_number = isinstance(one, (int, float)) and not isinstance(one, InputIndex)
            what = f"was {one} and is {other} now" if is_number else "is another buffer now"
            return f"({name}) has another argument: number {index} {what}"
    return None


def _of_ends(before: Segment, after: Segment, count: int) -> str | None:
    """Compare the ends of two segments: number of launches, states of gradients, and host functions."""
    if len(before.launches) != len(after.launches):
        longer = max(before.launches, after.launches, key=len)
        name = longer[min(len(before.launches), len(after.launches))].kernel.function_name
        return f"launch {count + 1} ({name}) {'is gone' if longer is before.launches else 'is new'}"
    if before.states != after.states:
        return f"after launch {count} other gradients are there"
    if _identity(before.function) != _identity(after.function):
        return f"after launch {count} another function runs on the host"
    return None


def _identity(function: object) -> object:
    """Return a value that is equal for functions created by the same code."""
    while hasattr(function, "func"):  # a partial
        function = function.func
    return getattr(function, "__qualname__", type(function))


class _Roles:
    """The pairs of corresponding memory in two runs."""

    def __init__(self, constants: dict[int, object], new_constants: dict[int, object]):
        self._constants, self._new_constants = constants, new_constants
        self._pairs: dict[int, Allocation] = {}
        self._taken: set[int] = set()

    def are_alike(self, before: object, after: object) -> bool:
        if isinstance(before, Allocation) and isinstance(after, Allocation):
            if id(before) not in self._pairs and id(after) not in self._taken:
                self._pairs[id(before)] = after
                self._taken.add(id(after))
            return self._pairs.get(id(before)) is after and before.nbytes == after.nbytes
        if isinstance(before, float) and isinstance(after, float):
            return repr(before) == repr(after)  # NaN is NaN, and 0 is not -0
        if hasattr(before, "int_ptr") and hasattr(after, "int_ptr"):
            held = self._constants.get(before.int_ptr)
            return bool(before == after) or (held is not None and held == self._new_constants.get(after.int_ptr))
        return type(before) is type(after) and bool(before == after)
