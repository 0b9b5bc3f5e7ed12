"""netcl's `distributed`: several devices in one process."""

from clcomm.devices import (
    DeviceManager,
    all_reduce,
    all_reduce_p2p,
    broadcast,
    broadcast_params,
    data_parallel_step,
    gather,
    prepare_replicas,
    replicate_params,
    scatter,
    shard_batch,
    sync_grads,
)

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
