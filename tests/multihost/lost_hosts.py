"""Jobs under `clcomm run --min-ranks` on three machines of which one is lost: the bits at the end, and the lost time.

`python -m tests.multihost.lost_hosts 12 SEED` loses a machine that often, at drawn moments: all of its processes end at
once, half of the time after its cable was cut, so that nothing tells of it. Where ranks run, which machine has rank 0,
and how often the state is copied are drawn too. A run's parameters and optimizer have to have the bits of one that
nobody disturbed. tests/multihost/test_lost_hosts.py does some.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from clcomm.base.errors import CheckpointError
from clcomm.comm.watch.restarts import STEP, read_progress
from clcomm.jobs.checkpoint import load
from tests.faults.killed_shards import LIMIT_S, OPTIONS, digest, percentile
from tests.faults.replaced_ranks import Job, until
from tests.multihost.machines import Machines, refusal

EPOCHS, STEPS = 1, 23


class Loss(NamedTuple):
    """A loss: whether the cable was cut first, seconds until the next step's copy, and the steps made again."""

    is_silent: bool
    seconds: float
    again: int


class LostRun:
    """A job on machines, started from the first one, with its checkpoint `file`.

    Args:
        order: the machines with ranks, by their index; the first has rank 0.
        ranks: of each of them.
        every: steps between two copies.
        shows_steps: whether the first rank's step is seen wherever that is: on the machines' shared disk. Else each
            machine has a temporary directory of its own, and only the newest copy's step is known.
        run: further options of `clcomm run`.
        script: a program to run in place of the training, and its arguments.
    """

    def __init__(
        self, machines: Machines, file: Path, order: tuple[int, ...], ranks: int = 1, every: int = 1,
        run: tuple[str, ...] = ("--min-ranks", "2", "--max-ranks", "4"), epochs: int = EPOCHS,
        shows_steps: bool = False, script: tuple[str, ...] = (),
    ):  # fmt: skip
        self.file, self._machines, first = file, machines, machines.addresses[0]
        self._used = [machines.addresses[each] for each in order]
        self._progress = file.parent if shows_steps else machines.memory(first)
        hosts = ",".join(f"{address}:{ranks}" for address in self._used)
        job = ("-m", "examples.mnist", *OPTIONS, "--epochs", str(epochs), "--memory-checkpoint-every", str(every))
        # The disk holds nothing of this run: only memory can have what the next ranks go on from.
        job = script or (*job, "--checkpoint", str(file), "--checkpoint-every", "9999")
        number = str(ranks * len(order))
        shared = {"TMPDIR": str(file.parent)} if shows_steps else {}
        self.process = subprocess.Popen(
            machines.enter(first, sys.executable, "-m", "clcomm", "run", *run, "--hosts", hosts, "-n", number, *job),
            env={**machines.environment(), **shared}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def copied(self, address: str) -> int:
        """Return the step of the copy in a machine's memory; 0: there is none."""
        step = 0
        for path in self._machines.memory(address).glob("clcomm-memory-*/state-0.npz"):
            with suppress(CheckpointError):  # another one takes its place
                step = int(load(path).facts["copied"])
        return step

    def until_copy(self, step: int) -> int:
        """Wait until a machine has a copy of this step or a later one; return the newest copy's step."""

        def found() -> int:
            newest = max(map(self.copied, self._used))
            if newest < step and self.process.poll() is not None:
                raise AssertionError(f"the job has ended: {self.process.communicate()[1]}")
            return newest if newest >= step else 0

        return until(found, LIMIT_S)

    def lose(self, index: int, is_silent: bool) -> Loss:
        """Lose a machine and wait until the ranks that are left have copied their first step."""
        victim = self._machines.addresses[index]
        before = self._worlds()
        if is_silent:
            self._machines.cut(victim)
        at, began_s = max(self.step(), *map(self.copied, self._used)), time.monotonic()
        self._machines.kill(victim)
        self._used.remove(victim)
        until(lambda: self._worlds() - before, LIMIT_S)
        newest = max(map(self.copied, self._used))
        first = self.until_copy(newest + 1)
        return Loss(is_silent, time.monotonic() - began_s, at - newest + max(0, first - newest - 1))

    def _worlds(self) -> set[str]:
        """Return the names of the progress files, of which each start of the ranks has its own."""
        return {str(path.relative_to(self._progress)) for path in self._progress.glob("clcomm-run-*/progress-*")}

    def step(self) -> int:
        """Return the step in which the ranks are, 0 where it is not seen."""
        return max((read_progress(str(self._progress / name))[STEP] for name in self._worlds()), default=0)

    def end(self) -> tuple[str, str]:
        """Return its hash when it has ended, "" where it failed, and what it said."""
        _, said = self.process.communicate(timeout=LIMIT_S)
        return digest(self.file) if self.process.returncode == 0 else "", said


def undisturbed(folder: Path, epochs: int = EPOCHS) -> str:
    """Return the hash of one rank's run."""
    return Job(folder / "undisturbed.npz", ranks=1, epochs=epochs).end()[0]


def drawn_loss(file: Path, drawn: random.Random) -> tuple[str, Loss, str]:
    """Run a job of which a drawn machine is lost at a drawn step; return its hash, the loss, and the job in words."""
    order = drawn.choice([(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 1), (1, 0)])
    ranks, every, step = 2 if len(order) == 2 else 1, drawn.choice([1, 5]), drawn.randint(1, STEPS - 8)
    victim, is_silent = drawn.choice([each for each in order if each]), drawn.random() < 0.5
    words = f"{ranks} a machine in order {order}, copies every {every}, {victim} lost after step {step}"
    with Machines(3) as machines:
        run = LostRun(machines, file, order, ranks, every, shows_steps=True)
        until(lambda: run.step() >= step, LIMIT_S)
        time.sleep(drawn.uniform(0, 0.3))
        loss = run.lose(victim, is_silent)
        found, said = run.end()
    if not re.search(rf"clcomm run: host {machines.addresses[victim]} is lost: ", said):
        found = said
    return found, loss, words


def main(losses: int, seed: int) -> int:
    reason, drawn, wrong, all_losses = refusal(), random.Random(seed), 0, list[Loss]()
    if reason:
        print(f"machines: {reason}")
        return 1
    with tempfile.TemporaryDirectory() as name:
        wanted = undisturbed(Path(name))
    for number in range(losses):
        with tempfile.TemporaryDirectory() as name:
            found, loss, words = drawn_loss(Path(name) / "run.npz", drawn)
        wrong += found != wanted
        all_losses.append(loss)
        end = "the undisturbed bits" if found == wanted else found
        how = "in silence" if loss.is_silent else "told"
        print(f"{number + 1}: {words} {how}: {loss.seconds:.1f} s, {loss.again} steps again; {end}", flush=True)
    for how, kind in (("told", False), ("in silence", True)):
        seconds = [loss.seconds for loss in all_losses if loss.is_silent == kind]
        print(f"{how}: p50 {percentile(seconds, 50):.1f} s, p95 {percentile(seconds, 95):.1f} s of {len(seconds)}")
    print(f"{losses} machines lost; at most {max(loss.again for loss in all_losses)} steps again; other bits: {wrong}")
    return wrong


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]] + [12, 0][len(sys.argv) - 1 :]
    sys.exit(main(*given[:2]) > 0)
