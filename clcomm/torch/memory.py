"""Tensors in shared memory, and the Communicator behind a process group."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError
from clcomm.torch.process_group import ClcommProcessGroup


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """Return the Communicator of a process group, for its stats, observers and traces; None: of the default group.

    Raises ArgumentError for a group of another backend.
    """
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ClcommProcessGroup):
        raise ArgumentError(f"group: expected one of backend 'clcomm', got {group!r}; call init_process_group first")
    return group.communicator


def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return a tensor of zeros in memory that the group's ranks share: its all-reduce copies no byte. Collective.

    Args:
        size: as for `torch.empty`, the same on every rank.
        dtype: None: the default one.
        group: whose collectives need no copy of it; None: the default group.

    Raises:
        ArgumentError: the group is of another backend.
        MismatchError: sizes differ between ranks.
    """
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    dtype = dtype or torch.get_default_dtype()
    nbytes = math.prod(shape) * dtype.itemsize  # type: ignore[arg-type]
    memory = communicator(group).allocate(max(1, nbytes))
    return torch.from_numpy(memory[:nbytes]).view(dtype).view(shape)
