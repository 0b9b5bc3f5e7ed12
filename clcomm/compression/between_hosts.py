"""Compression where it pays: each host's ranks add up in shared memory, and only what goes between hosts is compressed.

Were every rank to send what it has, several ranks a host would put more on the cable than without compression.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from clcomm.buckets import Bucket
from clcomm.communicator import Communicator
from clcomm.compression.ranks import FirstRanks
from clcomm.compression.task import PreparedHook, Task
from clcomm.shared_space import SharedSpace
from clcomm.transport import Transport


def is_for(comm: Communicator, hook: Any, own: np.ndarray, mean: np.ndarray) -> bool:
    """Say whether a hook is called between hosts alone, for gradients that lie here and means that appear there."""
    return getattr(hook, "between_hosts", False) and comm.joins_hosts(own, mean)


def prepared(
    comm: Communicator, hook: Any, space: SharedSpace, bucket: Bucket, own: np.ndarray, mean: np.ndarray, label: str
) -> Callable[[], int]:
    """Return what reduces a bucket with a hook between hosts, and returns what a host handed over; collective.

    The hook gets, as gradient and as `out`, the host's sum, weighed so that the mean over hosts is that over ranks.
    """
    weight = mean.dtype.type(comm.hosts / comm.size)
    first_ranks: FirstRanks | None = None
    call: Callable[[], object]

    def between(transport: Transport) -> int:
        nonlocal first_ranks, call
        if first_ranks is None:  # now, as only a host's first rank knows this transport
            first_ranks = FirstRanks(transport)
            call = partial(hook, mean, first_ranks, mean, bucket)
            if isinstance(hook, PreparedHook):
                task = Task(mean, first_ranks, mean, bucket, space.arrays.reduced, space.replica.codec)
                call = hook.prepare(task)
        first_ranks.handed_over = 0
        with np.errstate(all="ignore"):
            np.multiply(mean, weight, out=mean)
        call()
        return first_ranks.handed_over

    return comm.all_reduce_between_hosts_init(own, mean, between, label=label)
