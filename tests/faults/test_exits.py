"""Ranks that leave of their own accord: with which exit code the job ends, and whether the others work on."""

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
