"""A rank that fails or dies ends the whole job soon, with one message that names the rank."""

from __future__ import annotations

import pytest

from tests.faults.failing import on_all, on_one
from tests.faults.launch import END_S, job


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


@pytest.mark.parametrize("call", ["run(main)", "main()"], ids=["run", "plain script"])
@pytest.mark.parametrize(("statement", "code"), [("os._exit(7)", 7), ("os._exit(0)", 0), ("os._exit(256)", 0)])
def test_leaving_without_exit_handlers_ends_all(tmp_path, statement, code, call):
    """The launcher kills the other ranks by SIGKILL, which gives the exit code."""
    ended = job(tmp_path, on_one(statement, call))
    assert ended.code != 0
    assert ended.after_failing_s < END_S
    assert ended.clcomm_lines() == [f"clcomm: rank 1 exited unexpectedly with exit code {code}"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_exit_code_0_of_one_rank_is_not_the_jobs(tmp_path, ranks, rank):
    """MPICH's launcher gives the ranks that it kills code 0 unless it collects one while some output is open."""
    for _ in range(3):
        ended = job(tmp_path, on_one("os._exit(0)").replace("comm.rank == 1", f"comm.rank == {rank}"), ranks=ranks)
        assert ended.code != 0
        assert ended.after_failing_s < END_S
        assert ended.clcomm_lines() == [f"clcomm: rank {rank} exited unexpectedly with exit code 0"]


def test_a_rank_that_is_killed_is_named(tmp_path):
    ended = job(tmp_path, on_one("note_step(3)\n        os.kill(os.getpid(), 9)"))
    assert ended.code != 0
    assert ended.after_failing_s < END_S
    assert len(ended.clcomm_lines()) == 1
    assert ended.clcomm_lines()[0].startswith("clcomm: rank 1 died at step 3 ")
