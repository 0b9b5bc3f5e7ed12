"""netcl's `distributed.data_parallel`: a batch's shards, and the parameters and gradients of replicas."""

from clcomm.devices import replicate_params, shard_batch, sync_grads
from clcomm.netcl.distributed.trainer import broadcast_params

__all__ = ["broadcast_params", "replicate_params", "shard_batch", "sync_grads"]
