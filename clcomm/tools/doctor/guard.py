"""A process that reports for the doctor when MPI hangs or kills it: the findings so far, and the stage.

The doctor sends it a report before each stage, as mpi4py holds Python's lock while MPI
starts, so no thread of the same process could print. The file runs as a program too, with the standard library alone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from typing import Any


class StageGuard:
    """The guard of this process, until `done`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())], stdin=subprocess.PIPE, start_new_session=True
        )

    def expect(self, within_s: float, late: str, dead: str) -> None:
        """Begin a stage, which ends with the next call.

        Args:
            within_s: seconds until the guard prints `late` and kills this process.
            late: the report in that case.
            dead: the report if this process ends within the stage.
        """
        self._tell({"within_s": within_s, "late": late, "dead": dead})

    def done(self) -> None:
        self._tell({})
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, what: dict[str, object]) -> None:
        stream = self._process.stdin
        assert stream is not None
        stream.write(json.dumps(what).encode() + b"\n")
        stream.flush()


def main(watched: int) -> None:
    """Follow the stages of a process from standard input."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher's, before this has spoken
    stage: dict[str, Any] = {}
    stages = open(0, "rb", buffering=0)  # noqa: SIM115 - open for as long as this process
    while True:
        if not select.select([stages], [], [], stage.get("within_s"))[0]:
            _print(stage["late"])
            if os.getppid() == watched:  # else it is gone, and its number may be another's
                os.kill(watched, signal.SIGKILL)
            return
        line = stages.readline()
        if not line:
            _print(stage.get("dead", ""))
            return
        stage = json.loads(line)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
