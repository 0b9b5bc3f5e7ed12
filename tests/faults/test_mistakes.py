"""A user's mistake is reported in one line, without a traceback, and ends the job with exit code 2."""

from __future__ import annotations

import pytest

from tests.faults.failing import MISTAKE, on_all, on_one
from tests.faults.launch import END_S, job


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
    raises = f"from clcomm.base import errors; raise errors.{error}Error('planted')"
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
    """The first Communicator fails on one rank while the others wait for it to join them."""
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
