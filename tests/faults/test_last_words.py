"""Failures while a failure is reported: the job still ends, with as much of the message as possible."""

from __future__ import annotations

import os
import socket

import pytest

from clcomm.comm.watch.endings import _unread
from tests.faults.failing import on_one
from tests.faults.launch import END_S, job


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
    """MPI_Abort without effect: MPI_Finalize waits for ranks that wait for this one, after Python's threads."""
    no_abort = "from clcomm.comm.watch import forced_end; forced_end.LAST_RESORT_S = 1.0; "
    no_abort += "from clcomm.comm.transport import mpi_failures; mpi_failures.abort = len"
    ended = job(tmp_path, on_one(f'{no_abort}; raise RuntimeError("boom")', "main()"), ranks=2)
    assert ended.code != 0
    assert ended.clcomm_lines() == ["clcomm: rank 1 failed:"]
