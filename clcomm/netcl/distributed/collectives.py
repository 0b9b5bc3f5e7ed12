"""netcl's `distributed.collectives`: operations on a list of tensors, one on each device."""

from clcomm.devices import all_reduce, all_reduce_p2p, broadcast, gather, scatter

__all__ = ["all_reduce", "all_reduce_p2p", "broadcast", "gather", "scatter"]
