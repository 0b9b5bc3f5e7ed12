"""Jobs under `clcomm run --min-ranks` whose ranks are killed again and again: the bits at the end, and the lost time.

`python -m tests.faults.replaced_ranks 100` kills that many times, one rank of four with SIGKILL at moments that
`--chaos` draws. A run's parameters and optimizer have to have the bits of one rank that nobody disturbed. A second
number is the seed, a third the mean distance of kills in seconds. tests/faults/test_replaced_ranks.py does single runs.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from clcomm.comm.watch import restarts, worlds
from tests.faults.killed_shards import LIMIT_S, OPTIONS, TRAINING, digest, percentile
from tests.faults.launch import ROOT, clean_environment

T = TypeVar("T")
#: The epochs of a measured run.
EPOCHS = 150

#: What is said of a death, and of the step after it.
_DEATH = re.compile(
    r"^clcomm run: exit code .* ranks(, which are ready)? \(restart|begins ([\d.]+) s after fault", re.M
)


class Job:
    """A job with logical shards, or a policy, and its checkpoint `file`.

    Args:
        run: options of `clcomm run`.
        options: of the job; epochs of logical shards have 23 steps.
    """

    def __init__(
        self, file: Path, *options: str, ranks: int, run: tuple[str, ...] = (), epochs: int = 120, policy: str = ""
    ):
        self.file, bounds = file, ("--min-ranks", "1", "--max-ranks", "4")
        command = [sys.executable, "-m", "clcomm", "run", *bounds, *run, "-n", str(ranks), "-m", "examples.mnist"]
        steps = (*TRAINING, "--policy", policy) if policy else OPTIONS
        own = [*steps, "--checkpoint", str(file), "--checkpoint-every", "1000", "--epochs", str(epochs), *options]
        self.process = subprocess.Popen(
            [*command, *own], cwd=ROOT, env=clean_environment(OMP_NUM_THREADS="1"), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def folder(self) -> Path | None:
        return next((each.folder for each in worlds.running() if each.pid == self.process.pid), None)

    def ranks(self, waiting: bool = False) -> list[tuple[int, int, str]]:
        """Return (world, process, progress file) of the ranks of worlds that have their turn, or that wait for it."""
        folder, found = self.folder(), []
        for process in Path("/proc").iterdir() if folder is not None else ():
            if process.name.isdigit():
                variables = _variables_of_rank(process)
                if variables.get(worlds.MEMORY) == str(folder):
                    world = int(variables[restarts.RESTART])
                    if worlds.gate(folder, world).exists() == waiting:
                        found.append((world, int(process.name), variables[restarts.PROGRESS]))
        return sorted(found)

    def until_step(self, step: int) -> list[tuple[int, int, str]]:
        """Return the ranks of the world that trains when it is at this step or further."""

        def found() -> list[tuple[int, int, str]]:
            return [each for each in self.ranks() if restarts.read_progress(each[2])[restarts.STEP] >= step]

        return until(found)

    def end(self) -> tuple[str, str]:
        """Return its hash when it has ended, and what it said; raises AssertionError where it has failed."""
        _, said = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == 0, said
        return digest(self.file), said


def _variables_of_rank(process: Path) -> dict[str, str]:
    """Return the environment of a rank; nothing for another process."""
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        if b"clcomm.jobs.launch.rank" in words and os.path.samefile(process / "exe", sys.executable):
            return dict(each.split("=", 1) for each in (process / "environ").read_text().split("\0") if "=" in each)
    except (OSError, UnicodeDecodeError):  # it has ended
        pass
    return {}


def until(condition: Callable[[], T], within_s: float = 120.0) -> T:
    """Return what a function returns as soon as that is true."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("nothing came within the time")


def killed_run(file: Path, seed: int, every: str, epochs: int) -> tuple[str, list[tuple[bool, float]]]:
    """Return the hash of a run whose ranks are killed, and of each death whether the next ranks were ready, and seconds
    to the begin of the next step.
    """
    chaos = ("--chaos", f"seed={seed},every={every}")
    found, said = Job(file, ranks=4, run=chaos, epochs=epochs).end()
    deaths, are_ready = [], False
    for ready, seconds in _DEATH.findall(said):
        if seconds:
            deaths.append((are_ready, float(seconds)))
        else:
            are_ready = bool(ready)
    return found, deaths


def main(kills: int, seed: int, every_s: float) -> int:
    drawn, deaths, wrong, runs = random.Random(seed), list[tuple[bool, float]](), 0, 0
    with tempfile.TemporaryDirectory() as name:
        undisturbed, _ = Job(Path(name) / "run.npz", ranks=1, epochs=EPOCHS).end()
    while len(deaths) < kills:
        with tempfile.TemporaryDirectory() as name:
            found, new = killed_run(Path(name) / "run.npz", drawn.getrandbits(32), f"{every_s:g}s", EPOCHS)
        deaths, runs, wrong = [*deaths, *new], runs + 1, wrong + (found != undisturbed)
        print(f"run {runs}: {len(new)} kills, {'the undisturbed bits' if found == undisturbed else found}", flush=True)
        for what, kind in (("the next ranks were ready", True), ("they were still starting", False)):
            times = [seconds for ready, seconds in deaths if ready == kind]
            said = f"p50 {percentile(times, 50):.2f} s, p95 {percentile(times, 95):.2f} s of {len(times)}"
            print(f"  to the next step where {what}: {said}", flush=True)
    print(f"{len(deaths)} kills in {runs} runs; runs that ended with other bits: {wrong}")
    return wrong


if __name__ == "__main__":
    given = [float(word) for word in sys.argv[1:]] + [20, 0, 15][len(sys.argv) - 1 :]
    sys.exit(main(int(given[0]), int(given[1]), given[2]) > 0)
