"""The check that ranks wrap the same model, at the start of DistributedDataParallel's own.

PyTorch's compares each rank with rank 0 in C++, so that ranks which find no difference go on, and the others raise a
RuntimeError whose traceback hides it. It has no hook, but calls the group's all-gather first, from a Python function
(see callers.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from clcomm.communicator import Communicator
from clcomm.sync.agreement import require_agreement


def require_same_parameters(comm: Communicator, parameters: Sequence[torch.Tensor]) -> None:
    """Raise the same MismatchError on every rank unless shapes and dtypes are equal; collective."""
    lines = [f"{list(each.shape)} {each.dtype}" for each in parameters]
    require_agreement(comm, "DistributedDataParallel's parameters", lines, "build the same model on every rank")
