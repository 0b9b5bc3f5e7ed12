"""Compression where it pays: each host's ranks add up in shared memory, and only what goes between hosts is compressed.

Were every rank to send what it has, several ranks a host would put more on the cable than without compression.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from clcomm.buckets import Bucket
from clcomm.communicator import Communicator
from clcomm.compression.ranks import FirstRanks
from clcomm.transport import Transport


def is_for(comm: Communicator, hook: Any, own: np.ndarray, mean: np.ndarray) -> bool:
    """Say whether a hook is called between hosts alone, for gradients that lie here and means that appear there."""
    return getattr(hook, "between_hosts", False) and comm.joins_hosts(own, mean)


def prepared(
    comm: Communicator, hook: Any, own: np.ndarray, mean: np.ndarray, bucket: Bucket, label: str
) -> Callable[[], int]:
    """Return what reduces a bucket with a hook between hosts, and returns what a host handed over; collective.

    The hook gets, as gradient and as `out`, the host's sum, weighed so that the mean over hosts is that over ranks.
    """
    weight = mean.dtype.type(comm.hosts / comm.size)

    def between(transport: Transport) -> int:
        first_ranks = FirstRanks(transport)
        with np.errstate(all="ignore"):
            np.multiply(mean, weight, out=mean)
        hook(mean, first_ranks, mean, bucket)
        return first_ranks.handed_over

    return comm.all_reduce_between_hosts_init(own, mean, between, label=label)
