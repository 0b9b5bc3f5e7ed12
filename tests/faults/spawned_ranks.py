"""Whether ranks can be replaced by MPI_Comm_spawn where others have died: bare calls of mpi4py under Open MPI's ULFM.

`python -m tests.faults.spawned_ranks 3` with Open MPI, as `make elastic MPI=openmpi` sets it up, runs each case so many
times. One of four ranks dies, the others shrink their communicator, spawn a rank and merge with it; then that happens
again. A run is as it has to be if four ranks come to its end. `clcomm run --min-ranks` exists because
none does: with Open MPI 5.0.11 and mpi4py 4.1.2 a first death was survived in each of 4 runs, a second one in 3 of 4
where it was one of the first ranks and in none where it was the spawned one. MPI_Comm_connect is no way either: two
mpiexecs have no server in common.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from tests.faults.elastic_runs import find_mpiexec
from tests.faults.launch import ROOT, clean_environment

RANKS, LIMIT_S = 4, 60.0
#: The ranks that die, one after the other; the rank that was spawned is the last one.
CASES = {"one death": "2", "then one of the first ranks": "20", "then the spawned rank": "23"}
_END = "came to the end"


def go_on(comm: Any, deaths: str) -> None:
    """Let these ranks of a communicator die, one after the other, each replaced before the next; then end."""
    from mpi4py import MPI

    for number, victim in enumerate(map(int, deaths)):
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        if comm.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                comm.allreduce(1)
        except MPI.Exception:
            comm.Revoke()
        comm = comm.Shrink()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        comm = spawn(comm, deaths[number + 1 :]).Merge(high=False)
        assert comm.allreduce(1) == RANKS
    print(_END, flush=True)
    time.sleep(1.0)  # all have come there before the others' ends are deaths to them
    os._exit(0)  # MPI_Finalize would wait for the dead


def spawn(comm: Any, deaths: str) -> Any:
    """Start a rank for which these deaths are to come."""
    return comm.Spawn(sys.executable, ["-m", "tests.faults.spawned_ranks", "rank", deaths], maxprocs=1)


def rank(deaths: str) -> None:
    """Be a rank: one of the first, or one that they have spawned."""
    from mpi4py import MPI

    parent = MPI.Comm.Get_parent()
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    if parent == MPI.COMM_NULL:
        go_on(MPI.COMM_WORLD.Dup(), deaths)
    whole = parent.Merge(high=True)
    assert whole.allreduce(1) == RANKS
    go_on(whole, deaths)


def main(times: int) -> int:
    mpiexec = find_mpiexec()
    if mpiexec is None:
        print("spawned ranks: expected Open MPI 5 beside this Python; make elastic MPI=openmpi")
        return 2
    for what, deaths in CASES.items():
        ended, began_s = list[str](), time.monotonic()
        for _ in range(times):
            launch = [mpiexec, "--with-ft", "ulfm", "--oversubscribe", "-n", str(RANKS), sys.executable]
            job = subprocess.Popen(
                [*launch, "-m", "tests.faults.spawned_ranks", "rank", deaths], env=clean_environment(), cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                start_new_session=True,
            )  # fmt: skip
            try:
                said, _ = job.communicate(timeout=LIMIT_S)
                ended.append(f"{said.count(_END)} ranks")
            except subprocess.TimeoutExpired:
                ended.append("a hang")
                job.terminate()  # the launcher ends its ranks, in groups of their own
                job.communicate()
        print(f"{what}: {', '.join(ended)} at the end, {(time.monotonic() - began_s) / times:.1f} s a run", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2] if len(sys.argv) > 2 else "")
    else:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
