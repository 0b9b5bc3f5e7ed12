"""A forked child's end does not affect the job: the ranks continue, and MPI stays initialised."""

from __future__ import annotations

import pytest

from tests.faults.launch import job

ENDS_A_CHILD = """
import multiprocessing, threading
import clcomm.comm.watch.termination_signals
clcomm.comm.watch.termination_signals.REACTION_S = 0.1
fork = multiprocessing.get_context("fork")

def process():
    child = fork.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    sys.stdout.write(f"{{child.exitcode}}\\n")

def pool():
    with fork.Pool(2) as workers:
        sys.stdout.write(f"{{sum(workers.map(abs, [-7, -8]))}}\\n")

def thread():
    works = threading.Thread(target=process)
    works.start()
    works.join()

def main():
    comm = Communicator()
    {does}()
    time.sleep(1)  # for a signal that went astray
    comm.barrier()

main()
"""


@pytest.mark.parametrize(("does", "out"), [("process", "-15\n"), ("pool", "15\n"), ("thread", "-15\n")])
def test_a_forked_child_that_is_ended_by_sigterm_is_no_end_of_the_job(tmp_path, does, out):
    ended = job(tmp_path, ENDS_A_CHILD.format(does=does), ranks=2)
    assert (ended.code, ended.out, ended.err) == (0, out * 2, "")


FORKS = """
import atexit

def leave(how):
    atexit.register(sys.stdout.write, f"{how} ")
    sys.excepthook = lambda *error: None
    if how == "sys.exit":
        sys.exit(3)
    if how == "exception":
        raise RuntimeError("a child's own")

def main():
    comm = Communicator()
    for how in ("return", "sys.exit", "exception"):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            return leave(how)
        if comm.rank == 1:
            sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])} ")
        comm.barrier()

CALL
"""


@pytest.mark.parametrize("call", ["main()", "run(main)"])
def test_a_forked_child_that_ends_as_python_does_leaves_the_ranks_their_mpi(tmp_path, call):
    ended = job(tmp_path, FORKS.replace("CALL", call), ranks=2)
    assert ended.code == 0
    assert sorted(ended.out.split()) == ["0", "1", "3", *["exception"] * 2, *["return"] * 2, *["sys.exit"] * 2]
    assert "MPI" not in ended.err
