"""The guard speaks where the doctor's process hangs or dies."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.launch import clean_environment

STAGES = "import os, time; from clcomm.tools.doctor.guard import StageGuard\n"
STAGES += "guard = StageGuard()\nguard.expect({}, 'late', 'dead')\n"


@pytest.mark.parametrize(
    ("within_s", "then", "said", "code"),
    [
        (0.1, "time.sleep(60)", "late", -9),
        (60, "os.kill(os.getpid(), 11)", "dead", -11),
        (60, "guard.expect(0.1, 'later', '')\ntime.sleep(60)", "later", -9),
        (0.1, "guard.done()\ntime.sleep(0.3); print('alive')", "alive\n", 0),
    ],
)
def test_what_the_guard_says(within_s, then, said, code):
    command = [sys.executable, "-c", STAGES.format(within_s) + then]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, env=clean_environment())
    assert (done.stdout, done.returncode) == (said, code)
