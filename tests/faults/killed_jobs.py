"""Jobs of `clcomm run`, `verify` and `plan` of which a drawn process gets a drawn signal at a drawn moment.

`python -m tests.faults.killed_jobs 200 SEED` draws that many. Afterwards no process of the job lives, nothing of it is
in its temporary directory and in its /dev/shm, which is its own where this process may have one, the exit code is a
documented one, and the same command starts again at once. tests/faults/test_killed_jobs.py runs a sample.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.faults.launch import clean_environment, mpiexec
from tests.leftovers import kill_with_descendants

#: How long a job may take on a busy machine, and what it may take to vanish: what is promised, and what fails a test.
HUNG_S, PROMISED_S, GONE_S = 120.0, 5.0, 30.0
_MARK = "TESTS_KILLED_JOB"
_SCRIPT = """
import os, sys, time
import numpy as np
from clcomm import Communicator
from clcomm.jobs.checkpoint import Checkpoint
from clcomm.jobs.checkpoint.memory import MemoryCopies
from training.checkpoint_series import CheckpointSeries
from clcomm.comm.watch.endings import note_step, run

def main():
    comm = Communicator()
    series = CheckpointSeries(comm, "run.npz", background=True)
    copies = MemoryCopies(comm)
    copies.newest()
    open("ready", "w").close()
    began_s = time.monotonic()
    for step in range(1, int(os.environ["TESTS_STEPS"])):
        comm.all_reduce(np.ones(3))
        checkpoint = Checkpoint(facts={"step": step})
        series.save(checkpoint if comm.rank == 0 else None)
        note_step(step)
        if copies.is_due(step) and copies.save(checkpoint, step, began_s):
            raise SystemExit(0)
        time.sleep(0.02)

run(main)
"""
#: The commands, and the exit code of a run that nobody disturbs; how often each is drawn; whether it replaces ranks.
COMMANDS: dict[str, tuple[Callable[[], list[str]], int, int, bool]] = {
    "run": (lambda: ["run", "-n", "2", "job.py"], 0, 4, False),
    "command": (lambda: ["run", "--restarts", "0", "--", mpiexec(), "-n", "2", sys.executable, "job.py"], 0, 2, False),
    "restarts": (lambda: ["run", "--restarts", "3", "--pause", "0.1", "-n", "2", "job.py"], 0, 4, True),
    "chaos": (lambda: ["run", "--chaos", "seed=1,every=900s", "-n", "2", "job.py"], 0, 1, False),
    "min-ranks": (lambda: ["run", "--min-ranks", "1", "-n", "2", "job.py"], 0, 4, True),
    "hosts": (lambda: ["run", "--min-ranks", "1", "-n", "2", "--hosts", "localhost:2", "job.py"], 0, 3, True),
    "verify": (lambda: ["verify", "job.py"], 2, 3, False),
    "plan": (lambda: ["--model", "mlp", "--ranks", "2", "--strategies", "dp"], 0, 1, False),
}
#: The programs of those that are none of `clcomm`'s.
_PROGRAMS = {"plan": "training.plan"}
#: The processes, by a word of their command lines; the launcher's own are told by their names.
_WORDS = {
    "agent": "clcomm.jobs.launch.host_agent", "keeper": "keeper_process.py", "monitor": "exit_monitor_process.py",
    "rank": "job.py|examples.mnist",
}  # fmt: skip
#: What a process is sent: all but the launcher's helpers would end.
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSEGV)
_DEADLY = (signal.SIGKILL, signal.SIGSEGV)


def command_line(command: str) -> list[str]:
    """Return a command's line."""
    return [sys.executable, "-m", _PROGRAMS.get(command, "clcomm"), *COMMANDS[command][0]()]


class Case(NamedTuple):
    """What is sent to which process of which command, how long after the command's begin, and how often."""

    command: str
    victim: str
    number: signal.Signals
    after_s: float
    times: int

    def __str__(self) -> str:
        twice = " twice" if self.times == 2 else ""
        return f"{self.command}: {self.number.name}{twice} to the {self.victim} after {self.after_s:.2f} s"


class Result(NamedTuple):
    """What was found: in words, "" for what has to be; and seconds until the whole job was gone."""

    problem: str
    gone_s: float
    was_hit: bool


def draw(rng: random.Random) -> Case:
    """Draw a case."""
    command = rng.choices(list(COMMANDS), [each[2] for each in COMMANDS.values()])[0]
    victims = ["supervisor", "supervisor", "supervisor", "mpiexec", "proxy", "rank", "monitor", "keeper"]
    victim = rng.choice([*victims, *["agent"] * 3 * (command == "hosts")])
    numbers = _DEADLY if victim in ("monitor", "keeper", "agent") else _SIGNALS
    longest_s = 8.0 if command == "plan" else 3.5
    return Case(command, victim, rng.choice(numbers), rng.uniform(0, longest_s), rng.choice((1, 1, 2)))


class KilledJob:
    """A command that runs in a folder, and what is left of it.

    Args:
        steps: of its script, 20 ms each.
    """

    def __init__(self, command: str, folder: Path, steps: int):
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        (folder / "job.py").write_text(_SCRIPT)
        self._ready = folder / "ready"
        self._ready.unlink(missing_ok=True)
        self._mark = f"{_MARK}={os.getpid()}-{time.monotonic_ns()}"
        name, _, value = self._mark.partition("=")
        environment = clean_environment(TMPDIR=str(self.temporary), TESTS_STEPS=str(steps), **{name: value})
        place = ["env", "--default-signal=INT,HUP"]
        if own_memory():
            place += ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
        self.errors = (folder / "errors").open("w+")
        self.process = subprocess.Popen(
            [*place, *command_line(command)], env=environment, cwd=folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=self.errors, start_new_session=True,
        )  # fmt: skip
        until(self._is_clcomm)
        self.memory = os.open(f"/proc/{self.process.pid}/root/dev/shm", os.O_RDONLY) if own_memory() else -1

    def _is_clcomm(self) -> bool:
        """Return whether it handles SIGTERM: until then Python or the shell decides."""
        if self.process.poll() is not None:
            return True
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
        return bool(caught >> (signal.SIGTERM - 1) & 1) and _words(self.process.pid)[1:2] == ["-m"]

    def living(self) -> list[int]:
        found = []
        for process in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with suppress(OSError):
                if self._mark.encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                    found.append(process)
        return found

    def victim(self, name: str) -> int | None:
        """Return a process of the job by what it is; None: there is none yet."""
        if name == "supervisor":
            return self.process.pid
        for process in self.living():
            words = _words(process)
            program = Path(words[0]).name if words else ""
            if name in ("mpiexec", "proxy"):
                if program == {"mpiexec": "mpiexec", "proxy": "hydra_pmi_proxy"}[name]:
                    return process
            elif process != self.process.pid and program.startswith("python") and _is(name, words):
                return process
        return None

    def is_ready(self) -> bool:
        return self._ready.exists()

    def left(self) -> list[str]:
        """Return what there is of the job, in words."""
        processes = [f"process {each}: {' '.join(_words(each))[:120]}" for each in self.living()]
        files = [str(path) for path in self.temporary.iterdir() if not _is_kept(path)]
        return processes + files + (os.listdir(self.memory) if self.memory >= 0 else [])

    def text(self) -> str:
        """Return what it wrote to its errors."""
        self.errors.flush()
        self.errors.seek(0)
        return self.errors.read()

    def close(self) -> None:
        """End what is left of it."""
        for process in self.living():
            kill_with_descendants(process)
        self.process.wait()
        self.errors.close()
        if self.memory >= 0:
            os.close(self.memory)


def _is_kept(path: Path) -> bool:
    """Return whether a file in the temporary directory is for later jobs, too: built kernels."""
    return path.name.startswith(("clcomm-cache", "clcomm-0", "pocl"))


def _is(name: str, words: list[str]) -> bool:
    """Return whether a command line is that of such a process, and not of one that the command is about to start."""
    return words[1:3] != ["-m", "clcomm"] and any(word in " ".join(words) for word in _WORDS[name].split("|"))


def _words(process: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return []


@cache
def own_memory() -> bool:
    """Return whether a process can have a /dev/shm of its own."""
    command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /dev/shm"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


def until(holds: Callable[[], bool], within_s: float = HUNG_S) -> bool:
    """Wait until something holds; return whether it does."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def allowed(case: Case, was_hit: bool) -> set[int]:
    """Return the exit codes that docs/exit-codes.md and docs/launchers.md have for it, as Popen writes them."""
    _, whole, _, replaces = COMMANDS[case.command]
    number = int(case.number)
    silent = (
        {1} if case.command == "hosts" and case.victim != "rank" else set()
    )  # a host that is lost before it answers
    if not was_hit or case.victim in ("monitor", "keeper", "agent"):
        return {whole} | silent
    if case.victim == "supervisor":
        return {whole, -number if case.number in _DEADLY else 128 + number}
    if case.command in ("verify", "plan"):
        return {0, 1, 2}  # they judge a job that has failed
    if replaces:
        return {whole} | silent
    if case.victim == "rank":
        return {whole, number, 128 + number, 9, number | 9}  # MPICH's launcher adds the others', which are killed
    return {whole, *range(1, 256)} - {2}


def run(case: Case, folder: Path) -> Result:
    """Run a command, disturb it, and look at what is left; start it again."""
    with ExitStack() as stack:
        job = KilledJob(case.command, folder, 100)
        stack.callback(job.close)
        began_s, was_hit = time.monotonic(), False
        time.sleep(case.after_s)
        needs_handlers = case.number == signal.SIGINT and case.victim != "supervisor"  # before, Python decides
        while job.process.poll() is None and time.monotonic() < began_s + HUNG_S:
            victim = None if needs_handlers and not job.is_ready() else job.victim(case.victim)
            if victim is not None:
                with suppress(ProcessLookupError):
                    for _ in range(case.times):
                        os.kill(victim, case.number)
                        was_hit = True
                        time.sleep(0.05)
                break
            time.sleep(0.01)
        hit_s, decides = time.monotonic(), job.is_ready() or case.number != signal.SIGINT  # else Python may
        if not until(lambda: job.process.poll() is not None):
            return Result(f"it does not end: {job.left()}", HUNG_S, was_hit)
        ended_s = time.monotonic()
        is_gone = until(lambda: not job.left(), GONE_S)
        gone_s = time.monotonic() - (hit_s if case.victim == "supervisor" and case.number in _DEADLY else ended_s)
        code, text = job.process.returncode, job.text()
        if not is_gone:
            return Result(f"left: {job.left()}; it said {text[-600:]}", gone_s, was_hit)
        if code not in allowed(case, was_hit):
            return Result(
                f"exit code {code}, expected {allowed(case, was_hit)}; it said {text[-600:]}", gone_s, was_hit
            )
        if "Traceback" in text and decides:
            return Result(f"a traceback: {text[-600:]}", gone_s, was_hit)
        if case.command == "plan":
            return Result("", gone_s, was_hit)
        again = KilledJob(case.command, folder, 3)
        stack.callback(again.close)
        until(lambda: again.process.poll() is not None)
        if again.process.returncode != COMMANDS[case.command][1]:
            return Result(f"again: exit code {again.process.returncode}: {again.text()[-600:]}", gone_s, was_hit)
        if not until(lambda: not again.left(), GONE_S):
            return Result(f"again: left {again.left()}", gone_s, was_hit)
        return Result("", gone_s, was_hit)


def main(cases: int, seed: int) -> int:
    """Run drawn cases, print each, and return how many failed."""
    failed, slow, hit = 0, 0, 0
    for number in range(cases):
        case = draw(random.Random(f"{seed} {number}"))
        with tempfile.TemporaryDirectory() as folder:
            result = run(case, Path(folder))
        failed, slow, hit = failed + bool(result.problem), slow + (result.gone_s > PROMISED_S), hit + result.was_hit
        print(f"{number:3} {case}: {result.problem or 'ok'} ({result.gone_s:.2f} s, hit {result.was_hit})", flush=True)
    print(f"{cases} cases, {hit} hit, {failed} failed, {slow} gone after more than {PROMISED_S:g} s")
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]), int(sys.argv[2]))))
