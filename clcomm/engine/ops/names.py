"""PyTorch's names of arguments for NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from clcomm.base.errors import ArgumentError

Result = TypeVar("Result")
PYTORCH_NAMES = {"dim": "axis", "keepdim": "keepdims", "input": "x"}


def pytorch_names(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that also takes `dim` for `axis`, `keepdim` for `keepdims` and `input` for `x`."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Result:
        for theirs in PYTORCH_NAMES.keys() & named.keys():
            if PYTORCH_NAMES[theirs] in named:
                raise ArgumentError(f"{function.__name__}: expected {theirs} or {PYTORCH_NAMES[theirs]}, got both")
            named[PYTORCH_NAMES[theirs]] = named.pop(theirs)
        return function(*args, **named)

    return call
