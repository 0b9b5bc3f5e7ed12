"""Scripts of jobs that fail, on one rank or on all of them."""

from __future__ import annotations

#: A rank that fails alone first waits for others to fail with it: only some of the tests take that whole time.
FAILS_ON_ONE = """
import clcomm.comm.watch.endings
clcomm.comm.watch.endings.AGREEMENT_S = 0.3

def main():
    comm = Communicator()
    if comm.rank == 1:
        failing()
        {statement}
    while True:
        comm.barrier()

{call}
"""

FAILS_ON_ALL = """
def main():
    comm = Communicator()
    comm.barrier()
    {statement}

{call}
"""

MISTAKE = 'raise ArgumentError("batch_size: expected at most 10, got 11")'


def on_one(statement, call="run(main)"):
    return FAILS_ON_ONE.format(statement=statement, call=call)


def on_all(statement, call="run(main)"):
    return FAILS_ON_ALL.format(statement=statement, call=call)
