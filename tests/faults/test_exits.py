"""Ranks that exit by themselves: the job's exit code, and whether the other ranks continue."""

from __future__ import annotations

import re

import pytest

from tests.faults.failing import on_all, on_one
from tests.faults.launch import END_S, job


def test_a_caught_exit_is_none(tmp_path):
    caught = "try:\n        sys.exit(5)\n    except SystemExit:\n        pass"
    ended = job(tmp_path, on_all(f"{caught}\n    if comm.rank: time.sleep(3)", "main()"))
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.parametrize(
    ("statement", "call"),
    [("sys.exit(5)", "run(main)"), ("raise Exit(5)", "run(main)")],
    ids=["sys.exit", "an exit of its own"],
)
def test_an_exit_on_one_rank_ends_all_with_its_code(tmp_path, statement, call):
    ended = job(tmp_path, "class Exit(SystemExit): pass\n" + on_one(statement, call))
    assert ended.code == 5
    assert ended.after_failing_s < END_S
    assert ended.clcomm_lines() == ["clcomm: rank 1: left with exit code 5"]
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(("asked", "code"), [(256, 1), (2**40, 1), (-1, 255)])
def test_a_failure_stays_one_in_the_8_bits_of_a_shell(tmp_path, asked, code):
    ended = job(tmp_path, on_one(f"sys.exit({asked})"), ranks=2)
    assert (ended.code, ended.clcomm_lines()) == (code, [f"clcomm: rank 1: left with exit code {asked}"])
    assert ended.after_failing_s < END_S


@pytest.mark.parametrize("statement", ["return 256", "sys.exit(256)"])
def test_ranks_that_fail_alike_with_a_code_of_many_bits(tmp_path, statement):
    assert job(tmp_path, on_all(statement), ranks=2).code == 1


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
    (line,) = ended.clcomm_lines()
    assert re.match("clcomm: rank 1: left while rank [02] waits for it in barrier #", line)


@pytest.mark.parametrize("works_s", [0, 7], ids=["waits", "computes"])
def test_a_plain_script_that_exits_ends_the_job_when_another_rank_waits_for_it(tmp_path, works_s):
    """Python has no hook for SystemExit, so its code is not the job's; after 7 s the rank is in MPI_Finalize."""
    works = f"time.sleep({works_s}); failing(); comm.barrier()"
    ended = job(tmp_path, f"comm = Communicator()\nif comm.rank == 1: sys.exit(5)\n{works}", ranks=2)
    assert ended.code == 1
    assert ended.after_failing_s < END_S
    (line,) = ended.clcomm_lines()
    assert re.fullmatch(r"clcomm: rank 1: left while rank 0 waits for it in barrier #\d+, called at \S*job.py.*", line)


@pytest.mark.parametrize("waits", ["allocate(8)", "rendezvous()"])
def test_a_rank_that_left_is_missed_in_collectives_without_a_number_too(tmp_path, waits):
    ended = job(tmp_path, f"comm = Communicator()\nif comm.rank == 1: sys.exit(0)\nfailing(); comm.{waits}", ranks=2)
    assert ended.code == 1
    (line,) = ended.clcomm_lines()
    assert line.startswith(f"clcomm: rank 1: left while rank 0 waits for it in {waits.split('(')[0]} after #0")


@pytest.mark.parametrize("waits", ["all_reduce(tensor)", "all_reduce(tensor, async_op=True).wait()", "recv(tensor, 1)"])
def test_a_rank_that_left_a_script_of_pytorch_is_missed(tmp_path, waits):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    script = f"""
import torch, torch.distributed as dist, clcomm.torch
dist.init_process_group("clcomm")
tensor = torch.ones(4)
dist.all_reduce(tensor)
if dist.get_rank() == 1: sys.exit(0)
dist.{waits}
"""
    ended = job(tmp_path, script, ranks=2)
    assert ended.code == 1
    (line,) = ended.clcomm_lines()
    assert line.startswith("clcomm: rank 1: left while rank 0 waits for it in ")


@pytest.mark.parametrize("communicator", ["comm", "comm = Communicator(); comm"])
def test_an_exception_is_all_that_a_program_ends_with(tmp_path, communicator):
    """Nothing that is collected as Python ends adds lines of its own."""
    script = f"comm = Communicator()\ndef main():\n    {communicator}.barrier()\n    raise KeyError('mine')\nmain()"
    ended = job(tmp_path, script, ranks=2)
    assert ended.code == 1 and "KeyError: 'mine'" in ended.err
    assert "Exception ignored" not in ended.err


def test_a_plain_script_that_exits_alike_on_all_ranks_keeps_its_code(tmp_path):
    ended = job(tmp_path, on_all("sys.exit(5)", "main()"), ranks=2)
    assert (ended.code, ended.err) == (5, "")


@pytest.mark.parametrize("leaves", ["sys.exit(5)", "os._exit(5)", "os._exit(0)"])
def test_a_rank_that_exits_before_it_has_a_communicator_ends_the_others(tmp_path, leaves):
    script = 'failing()\nif os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":\n'
    ended = job(tmp_path, f"{script}    {leaves}\nCommunicator()", ranks=2)
    assert ended.code != 0
    assert ended.after_failing_s < END_S
    code = 5 if "5" in leaves else 0
    line = f"clcomm: rank 1 exited unexpectedly with exit code {code} before it had a Communicator"
    assert ended.clcomm_lines() == [line]


@pytest.mark.parametrize("leaves", ["sys.exit(2)", "os._exit(2)"])
def test_ranks_that_all_exit_before_they_have_a_communicator_need_no_words(tmp_path, leaves):
    ended = job(tmp_path, leaves, ranks=2)
    assert (ended.code, ended.err) == (2, "")


def test_an_exit_of_a_thread_is_the_threads_own(tmp_path):
    exits = "import threading\n    thread = threading.Thread(target=sys.exit, args=(5,)); thread.start(); thread.join()"
    ended = job(tmp_path, on_all(exits, "main()"))
    assert (ended.code, ended.err) == (0, "")


def test_a_rank_that_leaves_well_lets_the_others_work_on(tmp_path):
    work = 'time.sleep(0.5); sys.stdout.write("worked on\\n")'
    ended = job(tmp_path, on_all(f"if comm.rank == 0: sys.exit(0)\n    {work}"))
    assert (ended.code, ended.out, ended.err) == (0, "worked on\n" * 2, "")


def test_several_ranks_that_leave_while_one_waits_need_one_line(tmp_path):
    ended = job(tmp_path, "comm = Communicator()\nif comm.rank != 1: sys.exit(5)\nfailing(); comm.barrier()", ranks=4)
    assert ended.code == 1
    (line,) = ended.clcomm_lines()
    assert re.match(r"clcomm: rank [023]: left while rank 1 waits for it in barrier #1, called at ", line)


@pytest.mark.parametrize("call", ["run(main)", "main()"], ids=["run", "plain script"])
@pytest.mark.parametrize("statement", ["return", "sys.exit(0)", "raise SystemExit(5)"])
def test_a_rank_that_leaves_while_others_wait_for_it_ends_them(tmp_path, statement, call):
    ended = job(tmp_path, on_one(statement, call))
    seen = "5" in statement and "run" in call
    assert ended.code == (5 if seen else 1)
    assert ended.after_failing_s < END_S
    (line,) = ended.clcomm_lines()
    waits = r"left while rank [02] waits for it in barrier #\d+, called at \S*job.py:\d+ in main"
    assert re.fullmatch(f"clcomm: rank 1: {'left with exit code 5' if seen else waits}", line.split(", from")[0])
