"""Idea: on several hosts a sum is taken within each host first, in shared memory, and only then between hosts.

    mpiexec -n 4 -ppn 2 -hosts alpha,beta python -m examples.one_idea.two_hosts          # MPICH
    python tests/multihost/two_hosts.py 2 2 -m examples.one_idea.two_hosts               # two hosts on one machine

Look at: which ranks share a host, what moved the data, and how much of it one rank exchanges with its peer on the other
host: its share of the sum, not all of it.
"""

import numpy as np

from clcomm import Communicator

COUNT = 1 << 16

with Communicator() as comm:
    hosts = comm.all_gather_object(comm.host)
    own = comm.allocate(COUNT * 4).view(np.float32)  # memory that the host's other ranks can read
    own[:] = 1 << comm.rank
    total = comm.all_reduce(own, out=comm.allocate_common(COUNT * 4).view(np.float32))  # one result on each host
    assert (total == (1 << comm.size) - 1).all()
    if comm.rank == 0:
        placed = {host: [rank for rank, where in enumerate(hosts) if where == host] for host in sorted(set(hosts))}
        (row,) = [row for row in comm.stats.as_dict()["operations"] if row["operation"] == "all_reduce"]
        share = COUNT * 4 // min(len(ranks) for ranks in placed.values()) if comm.hosts > 1 else 0
        print(f"{comm.hosts} host(s) with ranks {list(placed.values())}; moved by {row['transport']}")
        print(f"an array of {COUNT * 4:,} bytes; a rank's share of it between hosts: {share:,}")
