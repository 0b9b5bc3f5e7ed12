"""Tensors in shared memory, and the Communicator behind a process group."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.comm.tensors import sharing
from clcomm.torch.process_group import ClcommProcessGroup


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """Return the Communicator of a process group, for its stats, observers and traces; None: of the default group.

    Raises ArgumentError for a group of another backend.
    """
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ClcommProcessGroup):
        raise ArgumentError(f"group: expected one of backend 'clcomm', got {group!r}; call init_process_group first")
    return group.communicator


def share(*tensors: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Move tensors to memory that the group's ranks share, in place: their collectives copy no byte. Collective.

    Their values, and all views of them, stay; their size is then fixed. The buckets of DistributedDataParallel need no
    call: they are moved in its first steps.

    Args:
        tensors: parameters, buffers or any tensors on the CPU, of the same sizes on every rank. Whole storages move.
        group: the one with these collectives; None: the default group.

    Returns:
        Whether they are in such memory: not without shared memory, nor where /dev/shm lacks room.

    Raises:
        ArgumentError: on every rank; a tensor is not dense, not on the CPU, or NumPy or another library uses it; or the
            group is of another backend.
        MismatchError: sizes differ between ranks.
    """
    return sharing.share(communicator(group), tensors)


def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return a tensor of zeros in memory that the group's ranks share: its all-reduce copies no byte. Collective.

    Args:
        size: as for `torch.empty`, the same on every rank.
        dtype: None: the default one.
        group: the one with its collectives; None: the default group.

    Raises:
        ArgumentError: the group is of another backend.
        MismatchError: sizes differ between ranks.
    """
    shape: tuple[int, ...] = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size  # type: ignore[assignment]
    dtype = dtype or torch.get_default_dtype()
    nbytes = math.prod(shape) * dtype.itemsize
    memory = communicator(group).allocate(max(1, nbytes))
    return torch.from_numpy(memory[:nbytes]).view(dtype).view(shape)
