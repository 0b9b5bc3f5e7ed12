"""The PyTorch function that calls a collective, where PyTorch gives the group no other sign of it.

DistributedDataParallel and Join have no hooks for what this package does there; where a function changes its name, the
import of `clcomm.tensors.private_torch` says so.
"""

from __future__ import annotations

import sys
from typing import Any

from clcomm.tensors.private_torch import compare_shapes, notify_join, run_joined

#: The functions that are looked for: DistributedDataParallel's comparison of parameters, the all-reduce by which Join
#: notices ranks without inputs, and the all-reduces of such a rank in place of its backward's.
COMPARES, NOTIFIES, HAS_JOINED = (each.__name__ for each in (compare_shapes, notify_join, run_joined))
#: Frames between a group's method and such a function: torch.distributed's own, and its logger's.
_MOST_FRAMES = 4


def locals_of_caller(*names: str) -> tuple[str, dict[str, Any]]:
    """Return name and variables of the nearest calling function with one of these names; "", {}."""
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame.f_code.co_name in names:
            return frame.f_code.co_name, frame.f_locals
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "", {}
