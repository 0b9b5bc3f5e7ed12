"""Idea: on several hosts a sum is taken within each host first, in shared memory, and only then between hosts.

    mpiexec -n 4 python -m examples.one_idea.two_hosts     # one host: halves of its ranks stand in for two
    mpiexec -n 4 -ppn 2 -hosts alpha,beta python -m examples.one_idea.two_hosts          # MPICH
    python tests/multihost/two_hosts.py 2 2 -m examples.one_idea.two_hosts               # two hosts on one machine

Look at: how many bytes a rank exchanges with its peer on the other host: without the idea all of the array, with it the
rank's share. Between hosts `all_reduce` does this by itself: see what moved the data.
"""

import numpy as np

from clcomm import Communicator

COUNT = 1 << 16


def exchanged(comm: Communicator) -> int:
    """Return the bytes of this rank's all-reduces so far."""
    return int(sum(row["bytes"] for row in comm.stats.as_dict()["operations"] if row["operation"] == "all_reduce"))


def compare(comm: Communicator, placed: list[list[int]]) -> None:
    """Sum an array without the idea and with it; print the bytes that one rank exchanges between hosts."""
    number, own_host = next((number, ranks) for number, ranks in enumerate(placed) if comm.rank in ranks)
    within = comm.split(number, name="within")
    between = comm.split(own_host.index(comm.rank), name="between")  # the ranks of the same place on each host
    assert within is not None and between is not None
    own, expected = np.full(COUNT, 1 << comm.rank, np.float32), (1 << comm.size) - 1
    whole = between.all_reduce(own.copy())  # everything between hosts, then within them
    assert (within.all_reduce(whole) == expected).all()
    without = exchanged(between)
    share = between.all_reduce(within.reduce_scatter(own))  # within hosts, then this rank's share between them
    assert (within.all_gather(share) == expected).all()
    shared = comm.allocate(COUNT * 4).view(np.float32)  # memory that the host's other ranks can read
    shared[:] = own
    assert (comm.all_reduce(shared, out=comm.allocate_common(COUNT * 4).view(np.float32)) == expected).all()
    if comm.rank == 0:
        row = next(row for row in comm.stats.as_dict()["operations"] if row["operation"] == "all_reduce")
        stand_in = "" if comm.hosts > 1 else ", which stand in for hosts"
        print(f"{comm.hosts} host(s), ranks {placed}{stand_in}; all_reduce moved by {row['transport']}")
        print(f"without: {without:,} of {COUNT * 4:,} bytes of each rank between hosts")
        print(f"with:    {exchanged(between) - without:,} of {COUNT * 4:,} bytes of each rank between hosts")


with Communicator() as comm:
    hosts = comm.all_gather_object(comm.host)
    numbers = [sorted(set(hosts)).index(host) for host in hosts]
    if comm.hosts == 1 and comm.size % 2 == 0:
        numbers = [2 * rank // comm.size for rank in range(comm.size)]
    placed = [[rank for rank, number in enumerate(numbers) if number == which] for which in sorted(set(numbers))]
    if len(placed) > 1 and len({len(ranks) for ranks in placed}) == 1:
        compare(comm, placed)
    elif comm.rank == 0:
        print(f"ranks {placed}: start as many on each of several hosts, or an even number on one, to compare")
