"""Compression between hosts: a host's ranks sum in shared memory, and the hosts exchange their sums compressed.

If every rank sent its own gradients, several ranks a host would send more between hosts than without compression.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from clcomm.base.flat_space.buckets import Bucket
from clcomm.comm.communicator import Communicator
from clcomm.comm.transport.base import Transport
from clcomm.sync.adapters.adapter import FlatArrays
from clcomm.sync.compression.coding import Codec
from clcomm.sync.compression.ranks import FirstRanks, PreparedHook, Task


def is_for(comm: Communicator, hook: object, own: np.ndarray, mean: np.ndarray) -> bool:
    """Return whether a hook reduces sums of hosts only, for gradients in `own` and means in `mean`."""
    return getattr(hook, "between_hosts", False) and comm.reduces_within_hosts(own, mean)


def prepared(
    comm: Communicator, hook: Any, arrays: FlatArrays, codec: Codec | None, bucket: Bucket, own: np.ndarray,
    mean: np.ndarray, label: str,
) -> Callable[[], int]:  # fmt: skip
    """Return the reduction of a bucket with a hook between hosts; it returns the bytes that a host sent. Collective.

    The hook gets the host's sum as gradient and as `out`, weighted so that the mean over hosts is that over ranks.

    Args:
        comm: the ranks.
        hook: for which `is_for` is True.
        arrays: the flat arrays of the gradients.
        codec: encodes gradients on the model's device; None: NumPy does.
        bucket: the bucket, of these arrays.
        own: the bucket's part of this rank's gradients.
        mean: the bucket's part of the means.
        label: the label under which the Communicator's stats count the reduction.
    """
    weight = mean.dtype.type(comm.hosts / comm.size)
    first_ranks: FirstRanks | None = None
    call: Callable[[], object]

    def between(transport: Transport) -> int:
        nonlocal first_ranks, call
        if first_ranks is None:  # only now, as only a host's first rank gets this transport
            first_ranks = FirstRanks(transport)
            call = partial(hook, mean, first_ranks, mean, bucket)
            if isinstance(hook, PreparedHook):
                task = Task(mean, first_ranks, mean, bucket, arrays.reduced, codec)
                call = hook.prepare(task)
        first_ranks.handed_over = 0
        with np.errstate(all="ignore"):
            np.multiply(mean, weight, out=mean)
        call()
        return first_ranks.handed_over

    return comm.all_reduce_between_hosts_init(own, mean, between, label=label)
