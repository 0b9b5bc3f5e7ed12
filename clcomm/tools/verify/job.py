"""Starts the ranks of a script under watch, and ends them: after their steps, at their ends, or when they wait."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from clcomm.jobs.launch.keeper import Keeper
from clcomm.jobs.launch.mpiexec import find_mpiexec
from clcomm.tools.verify.job_record import JobRecord
from clcomm.tools.verify.rank import ABORT, GO, LOOK_S
from clcomm.tools.verify.record import Progress, read, read_progress

#: How long ranks may be silent before their first forward, as they import libraries and read data; in seconds.
START_S = 180.0
#: How long ranks may be silent once another is at its end, and how long all may take to leave; in seconds.
GRACE_S, LEAVE_S = 3.0, 10.0


def watch(job: Sequence[str], ranks: int, steps: int, limit_s: float, keeper: Keeper, output: Path) -> JobRecord:
    """Run a script's ranks and return their records.

    Args:
        job: a script or -m and a module, and its arguments.
        ranks: how many of them.
        steps: of each optimizer.
        limit_s: how long all ranks may be silent once they train.
        keeper: of the job, with the folder for the records.
        output: the file for what the ranks print.
    """
    mpiexec, folder = find_mpiexec(), keeper.folder
    command = [
        *mpiexec.command(ranks, "", ""),
        sys.executable,
        "-m",
        "clcomm.tools.verify.rank",
        str(folder),
        str(steps),
        *job,
    ]
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, env={**keeper.environment(), **mpiexec.environment()}, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            is_stuck = _follow(process, folder, ranks, limit_s)
        finally:
            process.kill()
            keeper.end(patience_s=0.0)
            process.wait()
    return JobRecord(read(folder, ranks), is_stuck)


def _follow(process: subprocess.Popen[bytes], folder: Path, ranks: int, limit_s: float) -> bool:
    """Wait for the ranks' ends and let them leave; return whether some waited in vain."""
    news, news_s, longest_s = 0, time.monotonic(), 0.0
    while process.poll() is None:
        ranks_now = read_progress(folder, ranks)
        now_s, latest = time.monotonic(), _latest(folder)
        if latest != news:
            if all(each.steps for each in ranks_now):  # before, libraries and data are loaded
                longest_s = max(longest_s, now_s - news_s)
            news, news_s = latest, now_s
        if all(each.ended for each in ranks_now):
            _end(process, folder, GO if _is_common(ranks_now) else ABORT)
            return False
        silent_s = now_s - news_s
        allowed_s = limit_s if all(each.has_begun for each in ranks_now) else max(limit_s, START_S)
        if silent_s > allowed_s or (any(each.ended for each in ranks_now) and silent_s > max(GRACE_S, 3 * longest_s)):
            _end(process, folder, ABORT)
            return True
        time.sleep(LOOK_S)
    return False


def _latest(folder: Path) -> int:
    """Return when a rank wrote its record last."""
    times = [0]
    for path in folder.glob("progress-*"):
        with suppress(FileNotFoundError):
            times.append(path.stat().st_mtime_ns)
    return max(times)


def _is_common(ranks: Sequence[Progress]) -> bool:
    return len(set(ranks)) == 1 and not ranks[0].failed


def _end(process: subprocess.Popen[bytes], folder: Path, word: str) -> None:
    """Give the ranks a word, and let them leave."""
    (folder / word).touch()
    with suppress(subprocess.TimeoutExpired):
        process.wait(LEAVE_S)
