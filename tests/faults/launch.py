"""Jobs of several ranks, started as a user starts them: mpiexec in a session of its own, watched from outside."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from clcomm.base.host.launcher import OF_TORCH
from tests.faults.pace import Pace

ROOT = Path(__file__).resolve().parents[2]
#: Prefixes of launchers' variables, which a job started from within another must not inherit.
LAUNCHERS = ("PMI_", "PMIX_", "MPI_LOCAL", "OMPI_", "PRTE_", "HYDRA", "HYDI_", "MPIEXEC", "CLCOMM_", "SLURM_")
#: How long a job may run after the failure of a rank.
END_S = 5.0
#: How long a whole job may take on a busy machine before it counts as hung.
HUNG_S = 90.0


@dataclass
class Ended:
    """A finished job. `after_failing_s`: from the script's last `failing()` to the end of mpiexec, at full pace."""

    code: int
    out: str
    err: str
    after_failing_s: float

    def clcomm_lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("clcomm: ")]


PREAMBLE = """
import os, sys, time
from clcomm import ClcommError, Communicator
from clcomm.base.errors import ArgumentError
from clcomm.comm.watch.endings import note_step, run

def failing():
    print("failing at", time.time(), file=sys.stderr, flush=True)

def ready():
    sys.stdout.write("ready\\n")  # in one piece, also where Python does not buffer
    sys.stdout.flush()
"""


def mpiexec() -> str:
    """Return the mpiexec of this Python's MPI, or else the first on PATH; skips the test where there is none."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("no mpiexec beside this Python nor on PATH")
    return found


def clean_environment(**extra: str) -> dict[str, str]:
    """Return the environment without launchers' variables, as in a shell."""
    everything = {name: os.environ.get(name, "") for name in list(os.environ)}  # pytest changes it in another thread
    kept = {name: value for name, value in everything.items() if not name.startswith(LAUNCHERS)}
    kept = {name: value for name, value in kept.items() if name not in OF_TORCH}  # importing clcomm.torch sets them
    kept.pop("CI", None)  # no live displays
    kept.pop("PYTHONUNBUFFERED", None)  # ranks whose every piece of a line is written at once mix their lines
    open_mpi = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": "^ucx",  # PyPI's build warns at each start that this component does not work
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return {**kept, **open_mpi, "PYTHONPATH": str(ROOT), **extra}


def memory_environment(**extra: str) -> dict[str, str]:
    """Return the environment of jobs whose memory is measured: UCX, in MPICH's wheel, else records each mmap."""
    return clean_environment(UCX_MEM_EVENTS="n", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", **extra)


def start(
    path: Path, script: str, *, ranks: int = 3, launcher: bool = True, under: Sequence[str] = (),
    preamble: str = PREAMBLE, python: Sequence[str] = (), **environment: str,
) -> subprocess.Popen:  # fmt: skip
    """Start a script on some ranks, or without a launcher, with these options of Python, and return at once."""
    path = path / "job.py"
    path.write_text(preamble + script)
    # A suite run in a shell's background ignores Ctrl-C, and its child processes would inherit that.
    command = ["env", "--default-signal=INT", *under, *([mpiexec(), "-n", str(ranks)] if launcher else [])]
    return subprocess.Popen(
        [*command, sys.executable, *python, str(path)],
        env=clean_environment(**environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, failed: float | None = None) -> Ended:
    """Wait for a job's end; a job that hangs is killed and fails the test.

    failed: time of the failure (time.time()), if the script does not print it itself.
    """
    with Pace() as pace:
        try:
            out, err = process.communicate(timeout=HUNG_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"the job hung; it wrote:\n{out}\n{err}")
    now = time.time()
    stamps = [float(line.split()[-1]) for line in err.splitlines() if line.startswith("failing at")]
    stamps += [] if failed is None else [failed]
    return Ended(process.returncode, out, err, (now - max(stamps, default=now)) / pace.slowdown())


def job(path: Path, script: str, **options) -> Ended:
    """Run a script on three ranks until it ends."""
    return finish(start(path, script, **options))


def interrupt_when_ready(process: subprocess.Popen, ready_ranks: int) -> Ended:
    """Press Ctrl-C, as a terminal does: SIGINT to mpiexec's process group."""
    assert process.stdout is not None
    for _ in range(ready_ranks):
        line = process.stdout.readline()
        if line != "ready\n":
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"the job was not ready: {line!r}, {process.communicate()[1]}")
    time.sleep(0.3)  # into the wait that follows `ready()`
    pressed = time.time()
    os.killpg(process.pid, signal.SIGINT)
    return finish(process, pressed)
