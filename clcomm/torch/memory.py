"""Tensors in shared memory, and the Communicator behind a process group."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from clcomm.base.errors import ArgumentError, LaunchError
from clcomm.comm.communicator import Communicator
from clcomm.comm.tensors import sharing
from clcomm.torch import launch
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


# --- Groups of those ranks of a launch that meet at a store, as torchft and other programs that regroup make. ---


def group_of_store(
    store: Any, rank: int, world_size: int, timeout: timedelta = timedelta(seconds=60), name: str = "regrouped"
) -> ClcommProcessGroup:
    """Return a new process group of the ranks that meet at a store; collective over them alone.

    What torchft's `ProcessGroupWrapper._create_pg` has to return (docs/pytorch-ddp.md).

    Args:
        store: one of torch.distributed's, such as a PrefixStore, that nobody else and no earlier group writes to.
        rank: this rank's number in the group.
        world_size: the number of the group's ranks.
        timeout: for the ranks to meet, and then for each of the group's collectives.
        name: the group's.

    Raises:
        ArgumentError: a number is out of range.
        GroupTimeoutError: not all ranks have met in time.
        LaunchError: they were not all started by one mpiexec, whose ranks alone MPI connects, or without MPI on one
            host; on every rank.
    """
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank: expected one from 0 up to world_size, which is {world_size}, got {rank}")
    if launch.meets_at_store(world_size):
        return ClcommProcessGroup.at_store(store, rank, world_size, name, timeout, is_default=False)
    places = launch.Meeting(store, rank, world_size, timeout).allgather(launch.own_place())
    members = [in_world for *_, in_world in places]
    launches = len({(host, launch) for host, launch, _ in places}) - len({host for host, *_ in places}) + 1
    if launches > 1 or len(set(members)) < world_size:
        raise LaunchError(
            f"group: expected different ranks of one MPI launch, got the ranks {members} of {launches} launches; "
            "MPI does not connect processes that were started apart: regroup within a launch, or use gloo"
        )
    tag = zlib.crc32(name.encode()) & 0x7FFF
    return ClcommProcessGroup.of_ranks(members, tag, store, name, timeout.total_seconds())
