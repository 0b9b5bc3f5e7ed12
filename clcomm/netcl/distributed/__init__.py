"""netcl's `distributed`: several devices in one process."""

from clcomm.netcl.distributed.collectives import all_reduce, all_reduce_p2p, broadcast, gather, scatter
from clcomm.netcl.distributed.data_parallel import broadcast_params, replicate_params, shard_batch, sync_grads
from clcomm.netcl.distributed.device_manager import DeviceManager
from clcomm.netcl.distributed.trainer import data_parallel_step, prepare_replicas

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
