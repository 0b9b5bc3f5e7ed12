"""How a job ends when a rank fails: soon, with one clear message and the right exit code."""

from __future__ import annotations

import os
import re
import socket

import pytest

from clcomm.job import _unread
from tests.faults.launch import END_S, interrupt_when_ready, job, start

#: A rank that fails alone waits for others to fail with it, in vain here: only some of the tests take that whole time.
FAILS_ON_ONE = """
import clcomm.job
clcomm.job.AGREEMENT_S = 0.3

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


def test_a_job_that_ends_well(tmp_path):
    ended = job(tmp_path, 'def main():\n    sys.stdout.write(f"rank {Communicator().rank}\\n")\nrun(main)')
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == ["rank 0", "rank 1", "rank 2"]
    assert ended.err == ""


def test_without_an_mpi_library_a_rank_is_alone_and_ranks_are_told(tmp_path):
    script = 'def main():\n    sys.stdout.write(f"alone {Communicator().size}\\n")\nrun(main)'
    for library in ("nowhere.so", str(tmp_path / "nowhere.so")):  # mpi4py fails in two ways
        alone = job(tmp_path, script, launcher=False, MPI4PY_LIBMPI=library)
        assert (alone.code, alone.out, alone.err) == (0, "alone 1\n", "")
        launched = job(tmp_path, script, ranks=2, MPI4PY_LIBMPI=library)
        assert launched.code == 2 and launched.out == ""
        assert len(launched.clcomm_lines()) == 2  # no MPI, no agreement on who says it
        assert "mpi4py: expected an MPI library for 2 ranks, found none" in launched.err


def test_mpis_own_shared_memory_has_no_name_while_a_job_runs(tmp_path):
    """So nothing stays of a job however it ends, its launcher killed too."""
    script = """
comm = Communicator()
comm.barrier()
with open("/proc/self/maps") as maps:
    named = [line for line in maps if "/dev/shm/" in line and not line.endswith("(deleted)\\n")]
sys.stdout.write("".join(named))
"""
    ended = job(tmp_path, script)
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_mains_return_value_is_the_exit_code(tmp_path):
    assert job(tmp_path, "def main():\n    Communicator()\n    return 3\nrun(main)").code == 3


@pytest.mark.parametrize("call", ["run(main)", "main()"], ids=["run", "plain script"])
def test_an_exception_on_one_rank_ends_all(tmp_path, call):
    ended = job(tmp_path, on_one('raise RuntimeError("boom")', call))
    assert ended.code == 1
    assert ended.after_failing_s < END_S
    assert ended.clcomm_lines() == ["clcomm: rank 1 failed:"]
    assert ended.err.count("Traceback") == 1
    assert "RuntimeError: boom" in ended.err
    assert "job.py" in ended.err


def test_an_exception_on_all_ranks_is_told_once_with_its_step(tmp_path):
    ended = job(tmp_path, on_all('note_step(7)\n    raise RuntimeError("boom")'))
    assert ended.code == 1
    assert ended.clcomm_lines() == ["clcomm: every rank of 3 failed at step 7:"]
    assert ended.err.count("RuntimeError: boom") == 1


def test_an_exception_in_a_thread_ends_all(tmp_path):
    fails = "def fails():\n            raise RuntimeError('boom')\n        import threading\n"
    ended = job(tmp_path, on_one(fails + "        threading.Thread(target=fails).start()", "main()"))
    assert ended.code == 1
    assert ended.after_failing_s < END_S
    assert ended.clcomm_lines() == ["clcomm: rank 1 failed:"]


@pytest.mark.parametrize(("statement", "code"), [("os._exit(7)", 7), ("os._exit(0)", 1), ("os._exit(256)", 1)])
def test_leaving_without_exit_handlers_ends_all(tmp_path, statement, code):
    ended = job(tmp_path, on_one(statement, "main()"))
    assert ended.code == code
    assert ended.after_failing_s < END_S
    assert ended.clcomm_lines() == [f"clcomm: rank 1: left by {statement}"]


def test_a_caught_exit_is_none(tmp_path):
    caught = "try:\n        sys.exit(5)\n    except SystemExit:\n        pass"
    ended = job(tmp_path, on_all(f"{caught}\n    if comm.rank: time.sleep(3)", "main()"))
    assert (ended.code, ended.err) == (0, "")


def test_a_rank_that_is_killed_is_named(tmp_path):
    ended = job(tmp_path, on_one("note_step(3)\n        os.kill(os.getpid(), 9)"))
    assert ended.code != 0
    assert ended.after_failing_s < END_S
    assert len(ended.clcomm_lines()) == 1
    assert ended.clcomm_lines()[0].startswith("clcomm: rank 1 died at step 3 ")


@pytest.mark.parametrize("does", ["time.sleep(60)", "comm.barrier()"], ids=["computes", "waits in MPI"])
def test_sigterm_on_one_rank_ends_all(tmp_path, does):
    ender = "threading.Timer(0.5, os.kill, (os.getpid(), 15)).start()"
    script = "import threading\n" + on_one(f"{ender}\n        failing()\n        {does}")
    ended = job(tmp_path, "time.sleep(60)".join(script.rsplit("comm.barrier()", 1)))  # what the others do
    assert ended.code == 143
    assert ended.after_failing_s < END_S
    assert ended.clcomm_lines() == ["clcomm: rank 1: ended by SIGTERM"]


@pytest.mark.parametrize("does", ["time.sleep(60)", "while True: comm.barrier()"], ids=["computes", "waits in MPI"])
def test_sigterm_on_all_ranks_at_once_is_told(tmp_path, does):
    ender = "threading.Timer(0.3, os.kill, (os.getpid(), 15)).start()"
    ended = job(tmp_path, "import threading\n" + on_all(f"{ender}\n    failing()\n    {does}", "main()"))
    assert ended.code != 0
    assert ended.after_failing_s < END_S
    lines = ended.clcomm_lines()
    assert lines
    assert all(re.fullmatch(r"clcomm: (rank \d: )?ended by SIGTERM", line) for line in lines)


ENDS_A_CHILD = """
import multiprocessing, threading
import clcomm.exits
clcomm.exits.REACTION_S = 0.1
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


def test_a_mistake_on_one_rank_is_one_line_that_names_it(tmp_path):
    ended = job(tmp_path, on_one(MISTAKE))
    assert ended.code == 2
    assert ended.after_failing_s < END_S
    assert ended.clcomm_lines() == ["clcomm: rank 1: batch_size: expected at most 10, got 11"]
    assert "Traceback" not in ended.err


def test_a_mistake_on_all_ranks_is_one_line(tmp_path):
    ended = job(tmp_path, on_all(MISTAKE))
    assert ended.code == 2
    assert ended.err == "clcomm: batch_size: expected at most 10, got 11\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [("Mismatch", 2), ("Checkpoint", 2), ("Divergence", 1), ("NonFinite", 1), ("CheckpointWrite", 1)],
)
@pytest.mark.parametrize("traceback", ["", "1"])
def test_what_another_start_may_cure_is_no_mistake(tmp_path, error, code, traceback):
    raises = f"from clcomm import errors; raise errors.{error}Error('planted')"
    assert job(tmp_path, on_all(raises), CLCOMM_TRACEBACK=traceback).code == code


def test_different_mistakes_are_all_told(tmp_path):
    ended = job(tmp_path, on_all('raise ClcommError("odd" if comm.rank % 2 else "even")'))
    assert ended.code == 2
    assert sorted(ended.clcomm_lines()) == ["clcomm: rank 0: even", "clcomm: rank 1: odd"]


@pytest.mark.parametrize("script", [on_one(MISTAKE), on_all(MISTAKE)], ids=["one rank", "all ranks"])
def test_the_traceback_of_a_mistake_on_request(tmp_path, script):
    ended = job(tmp_path, script, CLCOMM_TRACEBACK="1")
    assert ended.code == 2
    assert "Traceback" in ended.err
    assert "ArgumentError: batch_size: expected at most 10, got 11" in ended.err


def test_a_plain_script_shows_a_mistake_as_one_line_too(tmp_path):
    ended = job(tmp_path, on_one(MISTAKE, "main()"))
    assert ended.code != 0
    assert ended.after_failing_s < END_S
    assert ended.clcomm_lines() == ["clcomm: rank 1: batch_size: expected at most 10, got 11"]
    assert "Traceback" not in ended.err


def test_a_refused_argument_on_one_rank_ends_those_that_wait_for_it(tmp_path):
    """The very first Communicator is refused on one rank, while the others wait for it to join them."""
    script = """
from mpi4py import MPI
if MPI.COMM_WORLD.Get_rank() == 2:
    failing()
Communicator(bucket_size=0 if MPI.COMM_WORLD.Get_rank() == 2 else 1)
Communicator().barrier()
"""
    ended = job(tmp_path, script)
    assert ended.code != 0
    assert ended.after_failing_s < END_S
    assert len(ended.clcomm_lines()) == 1
    assert ended.clcomm_lines()[0].startswith("clcomm: rank 2: bucket_size: expected a positive number of bytes")


@pytest.mark.parametrize(
    ("statement", "call"),
    [("sys.exit(5)", "run(main)"), ("sys.exit(5)", "main()"), ("raise Exit(5)", "main()")],
    ids=["run", "plain script", "an exit of its own"],
)
def test_an_exit_on_one_rank_ends_all_with_its_code(tmp_path, statement, call):
    ended = job(tmp_path, "class Exit(SystemExit): pass\n" + on_one(statement, call))
    assert ended.code == 5
    assert ended.after_failing_s < END_S
    assert ended.clcomm_lines() == ["clcomm: rank 1: left with exit code 5"]
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("call", ["run(main)", "main()"], ids=["run", "plain script"])
@pytest.mark.parametrize(("asked", "code"), [(256, 1), (2**40, 1), (-1, 255)])
def test_a_failure_stays_one_in_the_8_bits_of_a_shell(tmp_path, asked, code, call):
    ended = job(tmp_path, on_one(f"sys.exit({asked})", call), ranks=2)
    assert (ended.code, ended.clcomm_lines()) == (code, [f"clcomm: rank 1: left with exit code {asked}"])
    assert ended.after_failing_s < END_S


@pytest.mark.parametrize(
    ("statement", "call"),
    [("return 256", "run(main)"), ("sys.exit(256)", "main()")],
    ids=["run", "plain script"],
)
def test_ranks_that_fail_alike_with_a_code_of_many_bits(tmp_path, statement, call):
    assert job(tmp_path, on_all(statement, call), ranks=2).code == 1


def test_sys_exit_on_all_ranks_needs_no_words(tmp_path):
    ended = job(tmp_path, on_all("sys.exit(5)"))
    assert (ended.code, ended.err) == (5, "")


def test_sys_exit_with_a_text(tmp_path):
    ended = job(tmp_path, on_all('sys.exit("no such option: --fast")'))
    assert (ended.code, ended.err) == (1, "no such option: --fast\n")


def test_a_plain_script_that_leaves_with_a_text(tmp_path):
    ended = job(tmp_path, on_one('raise SystemExit("no such option: --fast")', "main()"))
    assert ended.code == 1
    assert ended.err.count("no such option: --fast\n") == 1
    assert ended.clcomm_lines() == ["clcomm: rank 1: left with exit code 1"]


def test_an_exit_of_a_thread_is_the_threads_own(tmp_path):
    exits = "import threading\n    thread = threading.Thread(target=sys.exit, args=(5,)); thread.start(); thread.join()"
    ended = job(tmp_path, on_all(exits, "main()"))
    assert (ended.code, ended.err) == (0, "")


def test_a_rank_that_leaves_well_lets_the_others_work_on(tmp_path):
    work = 'time.sleep(0.5); sys.stdout.write("worked on\\n")'
    ended = job(tmp_path, on_all(f"if comm.rank == 0: sys.exit(0)\n    {work}"))
    assert (ended.code, ended.out, ended.err) == (0, "worked on\n" * 2, "")


@pytest.mark.parametrize("call", ["run(main)", "main()"], ids=["run", "plain script"])
@pytest.mark.parametrize("statement", ["return", "sys.exit(0)", "raise SystemExit(5)"])
def test_a_rank_that_leaves_while_others_wait_for_it_ends_them(tmp_path, statement, call):
    ended = job(tmp_path, on_one(statement, call))
    seen = "5" in statement
    assert ended.code == (5 if seen else 1)
    assert ended.after_failing_s < END_S
    (line,) = ended.clcomm_lines()
    waits = r"left while rank [02] waits for it in barrier #\d+, called at \S*job.py:\d+ in main"
    assert re.fullmatch(f"clcomm: rank 1: {'left with exit code 5' if seen else waits}", line.split(", from")[0])


def test_what_a_launcher_has_not_read_is_known(tmp_path):
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "file").open("wb", buffering=0) as file:
        for far, near in ((reader, writer), (theirs.fileno(), ours.fileno())):
            os.write(near, b"last words")
            assert _unread(near) > 0
            os.read(far, 10)
            assert _unread(near) == 0
        file.write(b"last words")
        assert _unread(file.fileno()) == 0
    os.close(reader)
    os.close(writer)
    assert _unread(writer) == 0


# --- failures while a failure is reported ---

FULL = 'sys.stdout = open("/dev/full", "w"); sys.stdout.write("lost")'
CANNOT_SAY = """
class Unspeakable(ClcommError):
    def __str__(self):
        raise ValueError("no words")
"""


@pytest.mark.parametrize("call", ["run(main)", "main()"], ids=["run", "plain script"])
@pytest.mark.parametrize("before", ["sys.stderr.close()", "sys.stderr = None", "sys.stdout.close()", FULL])
def test_streams_that_fail_keep_no_job_from_its_end(tmp_path, before, call):
    ended = job(tmp_path, on_one(f'{before}; raise RuntimeError("boom")', call), ranks=2)
    assert ended.code == 1
    assert ended.after_failing_s < END_S
    assert ended.err.count("RuntimeError: boom") == ("stdout" in before)


def test_a_message_that_no_encoding_has(tmp_path):
    ended = job(tmp_path, on_one('raise RuntimeError("no file \\udcff")'), ranks=2)
    assert ended.code == 1
    assert ended.after_failing_s < END_S
    assert ended.err.endswith("RuntimeError: no file \\udcff\n")


@pytest.mark.parametrize("call", ["run(main)", "main()"], ids=["run", "plain script"])
def test_an_exception_that_cannot_be_reported(tmp_path, call):
    ended = job(tmp_path, CANNOT_SAY + on_one("raise Unspeakable", call), ranks=2)
    assert ended.code == 1
    assert ended.after_failing_s < END_S
    assert ended.clcomm_lines() == ["clcomm: rank 1 failed: Unspeakable, and ValueError while it was reported"]


def test_a_rank_whose_mpi_does_not_end_is_killed_in_the_end(tmp_path):
    """As if MPI_Abort had no effect: MPI_Finalize waits for ranks that wait for this one, after Python's threads."""
    no_abort = "import clcomm.exits; clcomm.exits.LAST_RESORT_S = 1.0; clcomm.job.mpi.abort = len"
    ended = job(tmp_path, on_one(f'{no_abort}; raise RuntimeError("boom")', "main()"), ranks=2)
    assert ended.code != 0
    assert ended.clcomm_lines() == ["clcomm: rank 1 failed:"]


# --- Ctrl-C ---

SLEEPS = """
def main():
    comm = Communicator()
    ready()
    time.sleep(60)

{call}
"""
ONE_SLEEPS = """
def main():
    comm = Communicator()
    ready()
    if comm.rank == 1:
        time.sleep(60)
    comm.barrier()

{call}
"""


@pytest.mark.parametrize("call", ["run(main)", "main()"], ids=["run", "plain script"])
@pytest.mark.parametrize("script", [SLEEPS, ONE_SLEEPS], ids=["all compute", "two wait for one"])
def test_ctrl_c_ends_a_job_cleanly(tmp_path, script, call):
    ended = interrupt_when_ready(start(tmp_path, script.format(call=call)), ready_ranks=3)
    assert ended.code != 0
    assert ended.after_failing_s < END_S
    assert "Traceback" not in ended.err
    assert "KeyboardInterrupt" not in ended.err
    assert len(ended.clcomm_lines()) <= 1


def test_ctrl_c_without_mpiexec(tmp_path):
    process = start(tmp_path, SLEEPS.format(call="run(main)"), launcher=False)
    ended = interrupt_when_ready(process, ready_ranks=1)
    assert (ended.code, ended.err) == (130, "clcomm: interrupted\n")


# --- one process, and another MPI's mpiexec ---


@pytest.mark.parametrize(
    ("statement", "code", "err"),
    [
        (MISTAKE, 2, "clcomm: batch_size: expected at most 10, got 11\n"),
        ("sys.exit(5)", 5, ""),
        ("sys.exit(256)", 1, ""),
        ("return 256", 1, ""),
        ("pass", 0, ""),
    ],
)
def test_alone_without_mpiexec(tmp_path, statement, code, err):
    ended = job(tmp_path, on_all(statement), launcher=False)
    assert (ended.code, ended.err) == (code, err)


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
@pytest.mark.parametrize(("call", "code"), [("run(main)", 2), ("main()", 1)], ids=["run", "plain script"])
def test_mpiexec_of_another_mpi(tmp_path, variable, call, code):
    ended = job(tmp_path, on_all("pass", call), launcher=False, **{variable: "4"})
    assert ended.code == code
    assert len(ended.err.splitlines()) == 1
    assert ended.err.startswith("clcomm: mpiexec: expected a world of 4 ranks (its environment says so), but ")
    assert "sees 1; start the job with the mpiexec of that MPI (installed beside this Python: " in ended.err
