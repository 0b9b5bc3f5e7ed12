"""Public names that go: they work and warn for two minor versions (CONTRIBUTING.md, what stays stable)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def deprecated(*, use: str, until: str) -> Callable[[F], F]:
    """Return a decorator of a function or method that warns at each place that calls it.

    Args:
        use: what to write instead, such as "Communicator.all_reduce".
        until: the version in which the name goes, such as "1.3"; a test fails from then on.
    """

    def decorate(function: F) -> F:
        text = f"{function.__qualname__}: goes in clcomm {until}; use {use}"

        @wraps(function)
        def warning(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        warning.__deprecated__ = text  # type: ignore[attr-defined]  # PEP 702's name, for tools
        return warning  # type: ignore[return-value]

    return decorate
