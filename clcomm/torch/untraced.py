"""Methods excluded from TorchDynamo: torch.compile would take a collective's Python code for a model's.

While a compiled model runs, Dynamo looks at every Python frame, those that PyTorch's C++ calls included. Marked
methods run unchanged, with all that they call.
"""

from __future__ import annotations

import types
from typing import TypeVar

from clcomm.tensors.private_torch import FrameAction, FrameStrategy, set_frame_strategy

_Class = TypeVar("_Class", bound=type)


def untraced(kind: _Class) -> _Class:
    """Mark all methods of a class, except those inherited from another marked one."""
    skipped = FrameStrategy(FrameAction.SKIP, FrameAction.SKIP)  # this frame, and those below it
    for value in vars(kind).values():
        method = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(method, types.FunctionType):
            set_frame_strategy(method.__code__, skipped)
    return kind
