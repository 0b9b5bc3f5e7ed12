"""Moving NumPy arrays between ranks: one interface, three ways.

`solo` is a world of one, `mpi` moves bytes through MPI, `shared` reduces in memory that all ranks of a host see.
All of them reduce in rank order, ((r0 + r1) + r2) + ..., so a result has the same bits whichever transport made
it and however the data was cut into calls.
"""

from clcomm.transport.base import Pending, Transport
from clcomm.transport.solo import SoloTransport

__all__ = ["Pending", "SoloTransport", "Transport"]
