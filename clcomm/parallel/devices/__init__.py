"""Several devices in one process: replicas of a model, a step on all of them, and collectives over their tensors.

The names are those of netcl's `distributed`; see docs/several-devices.md.
"""

from clcomm.parallel.devices.collectives import all_reduce, all_reduce_p2p, broadcast, gather, scatter
from clcomm.parallel.devices.manager import DeviceManager
from clcomm.parallel.devices.replicas import Replicas, broadcast_params, prepare_replicas, replicate_params, sync_grads
from clcomm.parallel.devices.step import data_parallel_step, shard_batch

__all__ = [
    "DeviceManager",
    "Replicas",
    "all_reduce",
    "all_reduce_p2p",
    "broadcast",
    "broadcast_params",
    "data_parallel_step",
    "gather",
    "prepare_replicas",
    "replicate_params",
    "scatter",
    "shard_batch",
    "sync_grads",
]
