"""Starts the ranks of a script under watch, and ends them: after their steps, at their ends, or when they wait."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from clcomm.jobs.launch.keeper import Keeper
from clcomm.jobs.launch.mpiexec import find_mpiexec
from clcomm.tools.verify.rank import ABORT, GO, LOOK_S
from clcomm.tools.verify.record import Progress, RankRecord, Step, read, read_progress

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


# --- The records of all ranks of a job, side by side. ---


class JobRecord:
    """All ranks' records."""

    def __init__(self, ranks: Sequence[RankRecord], is_stuck: bool = False):
        self.ranks = ranks
        #: Whether some rank waited longer than the limit.
        self.is_stuck = is_stuck and not any(rank.joins for rank in ranks)
        self.counts = [len(rank.complete) for rank in ranks]
        self.sizes = dict(pair for rank in ranks for pair in rank.sizes.items())
        self.names = [*self.sizes]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_broken(self) -> bool:
        """Whether the ranks did not come to a common end."""
        is_short = len(set(self.counts)) > 1 and not any(rank.joins for rank in self.ranks)
        return self.is_stuck or is_short or any(rank.error for rank in self.ranks)

    def steps(self) -> Iterator[tuple[int, list[Step]]]:
        """Yield (number from 1 up, the ranks' steps) as far as all ranks completed them."""
        for index in range(min(self.counts)):
            yield index + 1, [rank.complete[index] for rank in self.ranks]

    def ordered(self, names: set[str]) -> list[str]:
        return sorted(names, key=lambda name: self.names.index(name) if name in self.sizes else len(self.names))

    def differing(self, hashes: Sequence[Mapping[str, str]]) -> list[str]:
        """Return the names whose hashes differ between ranks, in the model's order."""
        return self.ordered({name for own in hashes for name in own if len({each.get(name) for each in hashes}) > 1})
