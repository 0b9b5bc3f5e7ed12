"""The PyTorch function behind a collective, where PyTorch gives the group no other sign of it.

DistributedDataParallel and Join have no hooks for this package's work there; where a function changes its name, the
import of `clcomm.comm.tensors.private_torch` says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from clcomm.comm.communicator import Communicator
from clcomm.comm.tensors.private_torch import compare_shapes, notify_join, run_joined
from clcomm.sync.agreement import require_agreement

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


def require_same_parameters(comm: Communicator, parameters: Sequence[torch.Tensor]) -> None:
    """Raise the same MismatchError on every rank unless shapes and dtypes are equal; collective.

    DistributedDataParallel compares each rank with rank 0 in C++: ranks without a difference go on, and the others
    raise a RuntimeError whose traceback hides it. It has no hook, but calls the group's all-gather first.
    """
    lines = [f"{list(each.shape)} {each.dtype}" for each in parameters]
    require_agreement(comm, "DistributedDataParallel's parameters", lines, "build the same model on every rank")
