"""`clcomm run`: which jobs are restarted, and that a resumed job has the same result."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from clcomm.comm.watch import restarts
from clcomm.jobs.checkpoint import load
from clcomm.jobs.launch import supervisor as launcher
from clcomm.jobs.launch.supervisor import FORWARDED, GRACE_S, LONGEST_PAUSE_S, End, reason_to_stop
from tests.faults.launch import HUNG_S, ROOT, clean_environment, mpiexec


def start(*command: str, restarts: int = 3, **environment: str) -> subprocess.Popen:
    launcher = [sys.executable, "-m", "clcomm", "run", "--restarts", str(restarts), "--pause", "0.01", "--"]
    return subprocess.Popen(
        [*launcher, *command], env=clean_environment(**environment), cwd=ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def run(*command: str, **options) -> tuple[int, str, list[str]]:
    process = start(*command, **options)
    out, err = process.communicate(timeout=HUNG_S)
    return process.returncode, out, err.splitlines()


def python(statement: str) -> tuple[str, ...]:
    return sys.executable, "-c", f"import os, sys; number = int(os.environ['CLCOMM_RESTART']); {statement}"


def test_a_job_is_started_again_until_it_ends_well():
    code, out, said = run(*python("print(number); sys.exit(7 if number < 2 else 0)"))
    assert (code, out) == (0, "0\n1\n2\n")
    assert said == [
        f"clcomm run: exit code 7; going on from its newest checkpoint, if there is one, in {pause} s "
        f"(restart {number} of 3)"
        for number, pause in ((1, "0.01"), (2, "0.02"))
    ]


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        (python("sys.exit(2)"), 2, "exit code 2 is a mistake that another start would repeat"),
        (("no-such-command",), 127, "the command can't be started"),
        (python("os.kill(os.getpid(), 9)"), 137, "it was started again once"),
    ],
)
def test_it_gives_up_with_a_reason_and_the_jobs_exit_code(command, code, reason):
    ended, _, said = run(*command, restarts=1)
    assert ended == code
    assert said[-1] == f"clcomm run: exit code {code}; giving up: {reason}"


@pytest.mark.parametrize(
    ("notes", "code"),
    [
        ("pass", 0),  # a program that does not use clcomm
        ("progress.note_started()", 1),
        ("progress.note_started(); progress.note_completed()", 0),
        ("progress.note_completed() if number else progress.note_started()", 0),
    ],
)
def test_exit_code_0_counts_where_a_rank_has_completed(notes, code):
    """With ULFM, Open MPI's mpiexec returns 0 for a job whose ranks were all killed."""
    ended, _, said = run(
        *python(f"from clcomm.comm.watch.job import this_job; progress = this_job().progress; {notes}"), restarts=1
    )
    assert ended == code, said
    missed = [
        line for line in said if line == "clcomm run: exit code 0, but no rank has completed: treated as a failure"
    ]
    assert len(missed) == {"pass": 0, "progress.note_started()": 2}.get(notes, int("number" in notes)), said


def test_two_failures_at_one_step_are_enough():
    assert reason_to_stop([End(1, 7, 5)], 9) == ""
    assert reason_to_stop([End(1, 7, 5), End(9, 7, 5)], 9) == "it failed twice at step 7, going on from step 5"
    assert reason_to_stop([End(1, 7, 5), End(1, 8, 5)], 9) == ""
    assert reason_to_stop([End(1, 7, 5), End(1, 7, 6)], 9) == ""
    assert reason_to_stop([End(1, 0, 0), End(1, 0, 0)], 9) == ""  # no rank notes its steps


@pytest.mark.parametrize(
    ("allowed", "said"), [(0, "no restarts are allowed"), (1, "once"), (2, "2 times"), (9, "9 times")]
)
def test_how_often_it_was_started_again_is_said_in_words(allowed, said):
    ends = [End(1, step, step) for step in range(1, allowed + 2)]
    assert reason_to_stop(ends, allowed) == (said if not allowed else f"it was started again {said}")


def test_sigterm_reaches_the_job_which_is_not_started_again():
    wait = "import time; print('ready', flush=True); time.sleep(60)"
    process = start(*python(wait))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=HUNG_S)
    assert (process.returncode, err) == (128 + signal.SIGTERM, "")


class Job:
    """A job that runs for some time by a clock of its own; its launcher gets the signals at the times given."""

    def __init__(self, lasts_s: float, signals: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch):
        self.now_s, self.ends_s, self.killed_s = 0.0, lasts_s, None
        self.launcher = launcher.Supervisor(["job"], 0, 0.0)
        self.launcher._process = self
        self.launcher._keeper = SimpleNamespace(look=lambda: None)
        self._signals = sorted(signals)
        monkeypatch.setattr(launcher.time, "monotonic", lambda: self.now_s)

    def wait(self, timeout: float | None = None) -> int:
        until_s = self.ends_s if timeout is None else self.now_s + timeout
        while self._signals and self._signals[0][0] <= min(until_s, self.ends_s):
            self.now_s, number = self._signals.pop(0)
            self.launcher._forward(number, None)
        self.now_s = max(self.now_s, min(until_s, self.ends_s))
        if self.now_s < self.ends_s:
            raise subprocess.TimeoutExpired("job", timeout)
        return -signal.SIGKILL if self.killed_s is not None else 5

    def send_signal(self, number: int) -> None:
        """A signal that the job ignores."""

    def kill(self) -> None:
        assert self.killed_s is None
        self.killed_s, self.ends_s = self.now_s, self.now_s + 0.5


@pytest.mark.parametrize("seed", range(60))
def test_a_job_has_all_of_its_grace_after_the_first_signal(seed: int, monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(seed)
    signals = [(rng.uniform(0, 4 * GRACE_S), rng.choice(FORWARDED)) for _ in range(rng.randrange(4))]
    job = Job(rng.uniform(0, 8 * GRACE_S), signals, monkeypatch)
    lasts_s, kill_s = job.ends_s, min((at_s for at_s, _ in signals), default=float("inf")) + GRACE_S
    code = job.launcher._ended(job)
    if lasts_s <= kill_s:
        assert (code, job.killed_s) == (5, None)
    else:
        assert (code, job.killed_s) == (128 + signal.SIGKILL, pytest.approx(kill_s))


@pytest.mark.parametrize("first_s", [0.0, 5e-324, 1e-300, 0.01, 1.0, 7.3, LONGEST_PAUSE_S])
def test_pauses_double_up_to_the_longest_however_many_there_are(first_s: float, monkeypatch, capsys):
    each = launcher.Supervisor(["job"], 5000, first_s)
    paused: list[float] = []
    monkeypatch.setattr(each._was_signalled, "wait", paused.append)
    ends: list[End] = []
    for step in range(1, 2501):
        ends.append(End(1, step, step))
        each._pause(ends)
    expected = [min(Fraction(first_s) * 2**doublings, Fraction(LONGEST_PAUSE_S)) for doublings in range(len(ends))]
    assert paused == expected
    last = f"going on from step 2500 in {paused[-1]:g} s (restart 2500 of 5000)"
    assert capsys.readouterr().err.splitlines()[-1] == f"clcomm run: exit code 1 at step 2500; {last}"


def test_within_mpiexec_it_is_refused():
    code, _, said = run("true", PMI_SIZE="2", PMI_RANK="0")
    assert code == 2
    assert said == ["clcomm: run: expected to be outside mpiexec, as in clcomm run -- mpiexec ..., got a rank"]


@pytest.mark.parametrize("length", range(0, 56, 4))
def test_a_progress_file_that_is_cut_short_ends_no_rank(tmp_path: Path, monkeypatch, length: int):
    path = tmp_path / "progress"
    path.write_bytes(bytes(restarts.FILE_BYTES))
    monkeypatch.setenv(restarts.PROGRESS, str(path))
    progress = restarts.ProgressFile()
    progress.note_started()
    progress.note(restarts.STEP, 7)
    assert restarts.read_progress(str(path)) == [7, 0, 1, 0, 0, 0]
    os.truncate(path, length)
    began = np.frombuffer(path.read_bytes()[: restarts.FILE_BYTES].ljust(restarts.FILE_BYTES, b"\0"), np.int64).tolist()
    assert restarts.read_progress(str(path)) == began
    progress.note(restarts.SAVED, 5)  # a mapped file that is truncated ends its process by SIGBUS
    progress.note(restarts.STEP, 8)
    progress.note_completed()
    assert restarts.read_progress(str(path)) == [8, 5, began[2], 1, *began[4:]]
    path.unlink()
    assert not any(restarts.read_progress(str(path)))
    os.close(progress._descriptor)


VICTIM = """
import os, signal, time
from clcomm.comm.watch.endings import run
from clcomm.comm.watch.restarts import SAVED, read_progress, restart_number
from examples.mnist import main
from training import trainer

note_step = trainer.note_step
def noted(step):
    note_step(step)
    if (restart_number(), step) in ((0, 5), (1, 9)) and trainer_rank() == 1:
        while not read_progress(os.environ["CLCOMM_PROGRESS"])[SAVED]:
            time.sleep(0.01)  # checkpoints are written beside the training
        os.kill(os.getpid(), signal.SIGKILL)

def trainer_rank():
    from clcomm.comm.transport.mpi_failures import place_in_world
    return place_in_world()[0]

trainer.note_step = noted
run(main)
"""


FLIPS_A_BIT = """
from clcomm.comm.watch.endings import run
from clcomm.comm.watch.restarts import restart_number
from clcomm.comm.transport.mpi_failures import place_in_world
from examples.mnist import main
from training.trainer import Trainer

record = Trainer._record
def flip(trainer, *told):
    record(trainer, *told)
    if (restart_number(), trainer.progress.step, place_in_world()[0]) == (0, 5, 1):
        state = trainer.model.state_dict()
        next(iter(state.values())).view("int32").reshape(-1)[0] ^= 1 << 22
        trainer.model.load_state_dict(state)

Trainer._record = flip
run(main)
"""


def test_a_flipped_bit_is_cured_by_another_start(tmp_path: Path):
    (tmp_path / "flips.py").write_text(FLIPS_A_BIT)
    arguments = ["--data", "synthetic", "--model", "mlp", "--no-eval", "--quiet", "--max-steps", "8"]
    arguments += ["--checkpoint-every", "2", "--checkpoint", str(tmp_path / "run.npz")]
    code, _, said = run(mpiexec(), "-n", "2", sys.executable, str(tmp_path / "flips.py"), *arguments)
    own = [line for line in said if line.startswith("clcomm run: ")]
    assert code == 0 and len(own) == 1 and own[0].startswith("clcomm run: exit code 1 at step 6; going on from"), said
    assert sum("clcomm: replicas: expected the same parameters" in line for line in said) == 1, said


def test_a_job_that_is_killed_twice_ends_with_the_bits_of_one_that_is_not(tmp_path: Path):
    (tmp_path / "victim.py").write_text(VICTIM)
    arguments = ["--data", "synthetic", "--model", "mlp", "--no-eval", "--quiet"]
    arguments += ["--max-steps", "12", "--checkpoint-every", "2"]
    job = (mpiexec(), "-n", "2", sys.executable)
    code, _, said = run(*job, str(tmp_path / "victim.py"), *arguments, "--checkpoint", str(tmp_path / "killed.npz"))
    own = [line for line in said if line.startswith("clcomm run: ")]
    assert code == 0, said
    # Rank 0 notes the steps; rank 1, the victim, may be a step ahead.
    steps = [re.search(r" at step (\d+); going on from step ", line) for line in own]
    assert [int(step[1]) for step in steps if step] in ([a, b] for a in (4, 5) for b in (8, 9)), own
    assert sum("clcomm: rank 1 died at step " in line for line in said) == 2, said
    assert run(*job, "-m", "examples.mnist", *arguments, "--checkpoint", str(tmp_path / "whole.npz"))[0] == 0
    killed, whole = load(tmp_path / "killed.npz"), load(tmp_path / "whole.npz")
    assert killed.arrays.keys() == whole.arrays.keys()
    for name, array in whole.arrays.items():
        if name.startswith("random/"):
            continue  # Python's own generator, seeded differently in each process
        assert np.asarray(killed.arrays[name]).tobytes() == np.asarray(array).tobytes(), name
