"""Faults that `clcomm run --chaos` plants in the ranks of its job, which follow from a seed.

A schedule gives each fault its kind, rank, and moment: a step, or seconds since the fault before. Every rank has the
schedule in CLCOMM_CHAOS, and does to itself what it is drawn for, at a drawn part of a step's time. CLCOMM_CHAOS_LOG
names a file of the command's to which ranks write each fault before it happens: a restarted job goes on with the next.
"""

from __future__ import annotations

import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from clcomm.base.errors import ArgumentError
from clcomm.base.host import variables
from clcomm.base.host.launcher import launched_rank
from clcomm.base.host.rank_process import launched_ranks
from clcomm.comm.stats.events import NOW
from clcomm.comm.watch.endings import print_line
from clcomm.comm.watch.job import Job
from clcomm.comm.watch.restarts import FAULTS, restart_number

CHAOS, LOG = "CLCOMM_CHAOS", "CLCOMM_CHAOS_LOG"
KILL, STOP, SLOW, FLIP = KINDS = "kill", "stop", "slow", "flip"
FORM = f"seed=N, every=20s or every=50 (steps) or at=120+400 (steps), and what={'+'.join(KINDS)}; default: what=kill"
#: The shortest and longest time that a rank is held; seconds.
HELD_S = 0.5, 2.0
#: How long a slow rank is stopped, and runs, in turns; seconds.
TURN_S = 0.02
_FIELDS = {
    "seed": r"\d{1,18}", "every": r"\d{1,9}(\.\d{1,9})?s|\d{1,9}", "at": r"\d{1,12}(\+\d{1,12})*",
    "what": "(K)(\\+(K))*".replace("K", "|".join(KINDS)),
}  # fmt: skip


class Fault(NamedTuple):
    """A fault: number from 1, kind, rank, step or seconds, which part of the step, length, and which bit it hits."""

    number: int
    kind: str
    rank: int
    at: float
    within: float
    lasts_s: float
    where: int


class Schedule(NamedTuple):
    """The faults of a command.

    Attributes:
        seed: what they are drawn from.
        every: the mean distance of two, in steps or seconds; each is from half of it to one and a half.
        in_steps: whether that is steps.
        at: their steps, in place of `every`.
        kinds: those that are drawn.
    """

    seed: int
    every: float
    in_steps: bool
    at: tuple[int, ...]
    kinds: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Schedule:
        """Return the schedule that a text such as "seed=7,every=20s,what=kill+stop" means; ArgumentError for others."""
        pairs = [part.partition("=") for part in text.split(",")]
        found = {name: value for name, _, value in pairs}
        wrong = [name for name in found if not re.fullmatch(_FIELDS.get(name, ""), found[name] or "-", re.ASCII)]
        if wrong or len(found) < len(pairs) or "seed" not in found or ("every" in found) == ("at" in found):
            raise ArgumentError(f"expected {FORM}; got {text[:60]!r}")
        every = found.get("every", "1")
        at = tuple(sorted(int(step) for step in found.get("at", "").split("+") if step))
        if float(every.rstrip("s")) <= 0:
            raise ArgumentError(f"expected every= above 0, got {every!r}")
        kinds = tuple(dict.fromkeys(found.get("what", KILL).split("+")))
        return cls(int(found["seed"]), float(every.rstrip("s")), not every.endswith("s"), at, kinds)

    def text(self, at: tuple[int, ...] = ()) -> str:
        """Return the text that means this schedule, or one with the same faults at these steps."""
        steps = at or self.at
        unit = f"{self.every:.0f}" if self.in_steps else f"{self.every:.9g}s"
        when = f"at={'+'.join(map(str, steps))}" if steps else f"every={unit}"
        return f"seed={self.seed},{when},what={'+'.join(self.kinds)}"

    def _distance(self, number: int) -> float:
        """Return the distance of a fault from the one before."""
        drawn = self.every * random.Random(f"{self.seed} {number} distance").uniform(0.5, 1.5)
        return max(1, round(drawn)) if self.in_steps else drawn

    def fault(self, number: int, ranks: int) -> Fault | None:
        """Return a fault of a job of so many ranks, which depends on seed and number alone; None: there is none."""
        if self.at and number > len(self.at):
            return None
        drawn = random.Random(f"{self.seed} {number}")
        kind, rank = self.kinds[int(drawn.random() * len(self.kinds))], int(drawn.random() * ranks)
        lasts_s, within, where = drawn.uniform(*HELD_S), drawn.random(), drawn.getrandbits(30)
        if self.at:
            at: float = self.at[number - 1]
        else:
            at = sum(map(self._distance, range(1, number + 1))) if self.in_steps else self._distance(number)
        return Fault(number, kind, rank, at, within, lasts_s, where)


class Planted(NamedTuple):
    """A fault as it happened: `step` 0 before the first, and when, in time.monotonic()'s seconds."""

    number: int
    kind: str
    rank: int
    step: int
    at_s: float


def read_log(path: str) -> list[Planted]:
    """Return the faults of a log; none where it is not on this host."""
    lines: list[str] = []
    with suppress(OSError), open(path) as file:
        lines = file.read().splitlines()
    words = [line.split() for line in lines]
    return [Planted(int(number), kind, int(rank), int(step), float(s)) for number, kind, rank, step, s in words]


class Injector:
    """The faults of this rank.

    Args:
        schedule: those of all ranks.
        log: the path of the command's log.
        job: this process's.
    """

    def __init__(self, schedule: Schedule, log: str, job: Job):
        self._schedule, self._log, self._job = schedule, log, job
        self._rank, self._ranks, self._pid = launched_rank() or 0, launched_ranks(), os.getpid()
        self._began_s = self._step_began_s = time.monotonic()
        self._step, self._shortest_s = 0, math.inf  # so far, within which a fault in a step strikes
        before = read_log(log)
        self._last = before[-1] if before else None
        # A log on another host is not seen here; each restart has had a fault.
        self._number = self._last.number if self._last else 0 if os.path.exists(log) else restart_number()
        self._flip: Fault | None = None  # one that waits for a step
        self._kill = threading.Thread()
        self._next = self._draw()
        if not schedule.in_steps:
            threading.Thread(target=self._follow_clock, name="clcomm-chaos", daemon=True).start()

    def _draw(self) -> Fault | None:
        self._number += 1
        return self._schedule.fault(self._number, self._ranks)

    def _follow_clock(self) -> None:
        while self._next is not None:
            time.sleep(self._next.at)
            self._plant(self._next, 0.0)
            self._next = self._draw()

    def step_begins(self, step: int) -> None:
        """Plant what is due in this step."""
        if os.getpid() != self._pid:
            return  # a forked child is not a rank
        if self._kill.ident is not None:
            self._kill.join()  # late on a busy machine: the step does not end before it
        now_s = time.monotonic()
        if self._last is not None and self._rank == 0:
            waited_s = now_s - self._last.at_s
            print_line(f"clcomm: chaos: step {step} begins {waited_s:.2f} s after fault {self._last.number}")
        if self._step:
            self._shortest_s = min(self._shortest_s, now_s - self._step_began_s)
        self._last, self._step, self._step_began_s = None, step, now_s
        if self._flip is not None:
            fault, self._flip = self._flip, None
            self._flip_bit(fault)
        while self._schedule.in_steps and self._next is not None and step >= self._next.at:
            fault, self._next = self._next, self._draw()
            self._plant(fault, fault.within * self._shortest_s if self._shortest_s < math.inf else 0.0)

    def _plant(self, fault: Fault, delay_s: float) -> None:
        if fault.rank != self._rank:
            return
        if fault.kind != FLIP:
            strike = partial(self._strike, fault, self._step, delay_s)
            thread = threading.Thread(target=strike, name="clcomm-chaos", daemon=True)
            thread.start()
            if fault.kind == KILL:
                self._kill = thread
        elif self._schedule.in_steps:
            self._flip_bit(fault)
        else:
            self._flip = fault

    def _strike(self, fault: Fault, step: int, delay_s: float) -> None:
        time.sleep(delay_s)
        self._tell(fault, step, "" if fault.kind == KILL else f" for {fault.lasts_s:.2f} s")
        if fault.kind == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            hold(fault.lasts_s, slowly=fault.kind == SLOW)

    def _flip_bit(self, fault: Fault) -> None:
        models = list(self._job.averagings.values())
        hit = models[fault.where % len(models)].flip_bit(fault.where) if models else ""
        self._tell(fault, self._step, f" in {hit}" if hit else ": nothing, as no Synchronizer has parameters here")

    def _tell(self, fault: Fault, step: int, more: str) -> None:
        """Write a fault to the log, and print it as one line."""
        now_s = time.monotonic()
        with suppress(OSError):
            file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
            os.write(file, f"{fault.number} {fault.kind} {fault.rank} {step} {now_s:.6f}\n".encode())
            os.close(file)
        self._job.progress.note(FAULTS, fault.number)
        moment = f"in step {step}" if step else "before the first step"
        print_line(
            f"clcomm: chaos: fault {fault.number}: {fault.kind} rank {self._rank} {moment}{more}, "
            f"{now_s - self._began_s:.2f} s after its start"
        )


_HOLD = """
import signal, sys, time
for turn in range(int(sys.argv[2])):
    for number in signal.SIGSTOP, signal.SIGCONT:
        signal.pidfd_send_signal(int(sys.argv[1]), number)
        time.sleep(float(sys.argv[3]) if number == signal.SIGSTOP or sys.argv[2] > "1" else 0)
"""


def hold(seconds: float, slowly: bool = False) -> None:
    """Stop this process for some time, or slow it down, and return when it runs again.

    A process of its own does that, which outlives the stopped one's group.
    """
    turns, lasts_s = (max(1, round(seconds / (2 * TURN_S))), TURN_S) if slowly else (1, seconds)
    handle, none = os.pidfd_open(os.getpid()), subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", "-c", _HOLD, str(handle), str(turns), str(lasts_s)]
    subprocess.run(
        command, stdin=none, stdout=none, stderr=none, start_new_session=True, check=False, pass_fds=[handle]
    )
    os.close(handle)


def arm(job: Job) -> None:
    """Plant the faults of CLCOMM_CHAOS in this rank from now on; not in what it starts."""
    try:
        schedule = Schedule.read(variables.text(CHAOS))
    except ArgumentError as error:
        raise ArgumentError(f"{CHAOS}: {error}") from None
    log = variables.text(LOG)
    del os.environ[CHAOS]
    NOW.step_begins = partial(Injector.step_begins, Injector(schedule, log, job))
