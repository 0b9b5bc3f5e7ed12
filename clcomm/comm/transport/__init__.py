"""Transports, which move NumPy arrays between ranks: one interface, four implementations; only here is mpi4py imported.

`solo` is a world of one, `mpi` moves bytes through MPI, `shared` reduces in a host's shared memory, and `hierarchical`
combines both on several hosts. Ranks that meet without MPI have a communicator in memory (`memory_comm.py`), on which
`mpi`, then called `memory`, and `shared` work as on MPI's. The order of summation does not depend on the length, so a
result has the same bits however the data was split into calls: rank order, ((r0 + r1) + r2) + ..., and in
`hierarchical` on several hosts, within each host first (docs/summation-order.md).
"""
