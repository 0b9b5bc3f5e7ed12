"""PyOpenCL's Python code for launches, generated once for each kernel in place of once for each kernel object.

PyOpenCL writes and compiles a function that sets a kernel's arguments and queues it, which takes 2 ms and stays in
memory. A recording has an object for each launch, and none of them is called; its cache, a database that all ranks
would lock, is off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

#: Those that queue a kernel with arguments, and that set them alone.
Functions = tuple[Callable[..., Any], Callable[..., Any]]


@cache
def share() -> None:
    """Let PyOpenCL's kernel objects of this process share their code; without effect where it makes it otherwise."""
    from pyopencl import invoker

    generate = getattr(invoker, "generate_enqueue_and_set_args", None)
    if generate is None:
        return
    known: dict[object, Functions] = {}

    def shared(*args: Any, **named: Any) -> Functions:
        try:
            key = tuple([_hashable(arg) for arg in (*args, *sorted(named.items()))])
            found = known.get(key)
        except TypeError:
            return generate(*args, **named)  # type: ignore[no-any-return]
        if found is None:
            has_types = (args[3] if len(args) > 3 else named.get("arg_types")) is not None
            found = known[key] = generate(*args, **named) if has_types else _when_called(generate, args, named)
        return found

    invoker.generate_enqueue_and_set_args = shared


def _hashable(value: Any) -> object:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _when_called(generate: Callable[..., Functions], args: Any, named: Any) -> Functions:
    """Return functions that are generated when one of them is called: objects without types rarely are."""

    @cache
    def made() -> Functions:
        return generate(*args, **named)

    return lambda *own, **options: made()[0](*own, **options), lambda *own, **options: made()[1](*own, **options)
