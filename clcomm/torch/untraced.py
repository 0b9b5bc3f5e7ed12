"""Methods that TorchDynamo leaves alone: a collective is Python code, which torch.compile would take for a model's.

While a compiled model runs, Dynamo looks at every Python frame, those that PyTorch's C++ calls included. What is marked
here runs as it is, with all that it calls.
"""

from __future__ import annotations

import types
from typing import TypeVar

from clcomm.tensors.private_torch import FrameAction, FrameStrategy, set_frame_strategy

_Class = TypeVar("_Class", bound=type)


def untraced(kind: _Class) -> _Class:
    """Mark all methods of a class, those that it inherits from another marked one aside."""
    skipped = FrameStrategy(FrameAction.SKIP, FrameAction.SKIP)  # this frame, and those below it
    for value in vars(kind).values():
        method = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(method, types.FunctionType):
            set_frame_strategy(method.__code__, skipped)
    return kind
