"""A process that does not end by itself is ended."""

from __future__ import annotations

import os
import signal
import subprocess

from clcomm.comm.watch import forced_end
from tests.faults.launch import HUNG_S


def test_a_process_that_stays_is_killed():
    with subprocess.Popen(["sleep", str(2 * HUNG_S)]) as stays:
        forced_end.start_killer(os.pidfd_open(stays.pid), 0.1)
        assert stays.wait(HUNG_S) == -signal.SIGKILL


def test_a_process_that_ends_is_left_alone():
    with subprocess.Popen(["sleep", "0.3"]) as ends:
        forced_end.start_killer(os.pidfd_open(ends.pid), HUNG_S)
        assert ends.wait(HUNG_S) == 0
