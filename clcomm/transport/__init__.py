"""Moving NumPy arrays between ranks: one interface, four ways.

`solo` is a world of one, `mpi` moves bytes through MPI, `shared` reduces in memory that all ranks of a host see, and
`hierarchical` does both where there are several hosts. All reduce in an order that depends on no length, so a result
has the same bits however the data was cut into calls: rank order, ((r0 + r1) + r2) + ..., and with several hosts
`hierarchical` within each host first (docs/summation-order.md).
"""

from clcomm.transport.base import Transport
from clcomm.transport.pending import Pending
from clcomm.transport.solo import SoloTransport

__all__ = ["Pending", "SoloTransport", "Transport"]
