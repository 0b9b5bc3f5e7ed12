"""netcl's `distributed`: several devices in one process."""

from clcomm.devices import (
    all_reduce,
    all_reduce_p2p,
    broadcast,
    gather,
    replicate_params,
    scatter,
    shard_batch,
    sync_grads,
)
from clcomm.netcl.distributed.manager import DeviceManager
from clcomm.netcl.distributed.trainer import broadcast_params, data_parallel_step, prepare_replicas

__all__ = [
    "DeviceManager",
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
