"""Groups of whichever of a launch's ranks meet at a store, as programs that regroup make them: torchft's, for one."""

from __future__ import annotations

import json
import zlib
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from clcomm.base.errors import ArgumentError, LaunchError, name_ranks
from clcomm.torch import launch
from clcomm.torch.interruptions import GroupTimeoutError
from clcomm.torch.process_group import ClcommProcessGroup


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
        LaunchError: they were not all started by one mpiexec, whose ranks alone MPI connects; on every rank.
    """
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank: expected one from 0 up to world_size, which is {world_size}, got {rank}")
    keys = [f"clcomm/{other}" for other in range(world_size)]
    store.set(keys[rank], json.dumps(launch.own_place()))
    try:
        store.wait(keys, timeout)
    except DistStoreError:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise GroupTimeoutError(
            f"group: expected {world_size} ranks at the store within {timeout.total_seconds():g} s, "
            f"{name_ranks(missing)} did not come"
        ) from None
    places = [json.loads(store.get(key)) for key in keys]
    members = [in_world for *_, in_world in places]
    launches = len({(host, launch) for host, launch, _ in places}) - len({host for host, *_ in places}) + 1
    if launches > 1 or len(set(members)) < world_size:
        raise LaunchError(
            f"group: expected different ranks of one MPI launch, got the ranks {members} of {launches} launches; "
            "MPI does not connect processes that were started apart: regroup within a launch, or use gloo"
        )
    tag = zlib.crc32(name.encode()) & 0x7FFF
    return ClcommProcessGroup.of_ranks(members, tag, store, name, timeout.total_seconds())
