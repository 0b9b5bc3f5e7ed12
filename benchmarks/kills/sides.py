"""The start of each side's ranks, and their kills."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from benchmarks.kills import task
from benchmarks.kills.outcome import Outcome
from benchmarks.kills.task import Task, Written
from benchmarks.workers import ROOT
from clcomm.base.errors import LaunchError

#: How long a start may take, the ranks that take the last step later than the first one, and processes to end.
START_S, LAST_S, END_S = 120.0, 10.0, 10.0
_LOOK_S = 0.02
#: torchft_lighthouse, which need not be on the PATH and reads the command line of a file, and its README's options.
_LIGHTHOUSE = "from torchft._torchft import lighthouse_main; lighthouse_main()"
_OPTIONS = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")

Side = Callable[[Task, int], AbstractContextManager[list[subprocess.Popen[str]]]]


def drawn_kills(seed: int, every_s: float, ranks: int) -> Iterator[tuple[float, int]]:
    """Yield the kills: seconds after the one before, or after the first step, and the rank."""
    drawn = random.Random(seed)
    while True:
        yield drawn.uniform(0.5, 1.5) * every_s, drawn.randrange(ranks)


@contextmanager
def clcomm(given: Task, ranks: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a job whose ranks are replaced, and end what is left of it."""
    sizes = ("--min-ranks", str(ranks), "--max-ranks", str(ranks), "-n", str(ranks))
    with ExitStack() as stack:
        command = ["-m", "clcomm", "run", *sizes, "-m", "benchmarks.kills.clcomm_rank", *given.words()]
        yield [stack.enter_context(_started(command, given.folder / "output"))]


@contextmanager
def torchft(given: Task, ranks: int, heartbeat_ms: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a lighthouse, and a torchrun that restarts its rank for each replica group; end them."""
    port = _free_port()
    address = f"http://{socket.gethostname()}:{port}"
    with ExitStack() as stack:
        program = given.folder / "lighthouse.py"
        program.write_text(_LIGHTHOUSE)
        words = [*_OPTIONS, "--bind", f"[::]:{port}", "--heartbeat_timeout_ms", str(heartbeat_ms)]
        found = [stack.enter_context(_started([str(program), *words], given.folder / "output-lighthouse"))]
        for group in range(ranks):
            variables = {"TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": str(group),
                         "NUM_REPLICA_GROUPS": str(ranks)}  # fmt: skip
            launch = ["--nnodes=1", "--nproc_per_node=1", "--max_restarts=1000", f"--master_port={_free_port()}"]
            command = ["-m", "torch.distributed.run", *launch, "-m", "benchmarks.kills.torchft_rank", *given.words()]
            found.append(stack.enter_context(_started(command, given.folder / f"output-{group}", variables)))
        yield found


def undisturbed(side: Side, steps: int, ranks: int) -> set[str]:
    """Return the hashes of a run without kills, as fast as it goes."""
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as name:
        given = Task(Path(name), steps, 0.0)
        written = Written(given.folder)
        with side(given, ranks) as jobs:
            _wait_for(written, given, jobs, task.ENDS, START_S + steps)
            _wait_for_all(written, jobs, ranks)
        return {each.digest for each in written.look().events if each.what == task.ENDS}


def killed(side: Side, given: Task, ranks: int, seed: int, every_s: float) -> Outcome:
    """Return the outcome of a run whose ranks are killed in drawn moments until it has ended."""
    written, kills_s = Written(given.folder), list[float]()
    with side(given, ranks) as jobs:
        _wait_for(written, given, jobs, task.STEP, START_S)
        last_s = time.monotonic()
        for distance_s, rank in drawn_kills(seed, every_s, ranks):
            if _has_ended(written, given, jobs, last_s + distance_s):
                break
            last_s = _kill(written, given, jobs, rank, ranks)
            kills_s.append(last_s)
        _wait_for_all(written, jobs, ranks)
    return Outcome.of(written.look().events, kills_s)


def _has_ended(written: Written, given: Task, jobs: list[subprocess.Popen[str]], until_s: float) -> bool:
    """Wait until then, or until a rank has taken the last step; return whether one has."""
    while time.monotonic() < until_s:
        if written.look().counts[task.ENDS]:
            return True
        _require_running(given.folder, jobs)
        time.sleep(min(0.5, max(0.0, until_s - time.monotonic())))
    return False


def _kill(written: Written, given: Task, jobs: list[subprocess.Popen[str]], rank: int, ranks: int) -> float:
    """Kill this rank, or the next one that takes steps, and return when; wait for one."""
    while True:
        newest = written.look().stepping
        for one in range(rank, rank + ranks):
            process = newest.get(one % ranks)
            if process is not None and _is_rank(process):
                os.kill(process, signal.SIGKILL)
                return time.monotonic()
        _require_running(given.folder, jobs)
        time.sleep(_LOOK_S)


def _is_rank(process: int) -> bool:
    try:
        place = Path("/proc", str(process))
        return b"benchmarks.kills." in (place / "cmdline").read_bytes()
    except OSError:
        return False


def _wait_for(written: Written, given: Task, jobs: list[subprocess.Popen[str]], what: str, limit_s: float) -> None:
    until_s = time.monotonic() + limit_s
    while not written.look().counts[what]:
        _require_running(given.folder, jobs)
        if time.monotonic() > until_s:
            raise LaunchError(f"{what}: expected it within {limit_s:.0f} s; {_said(given.folder)}")
        time.sleep(_LOOK_S)


def _wait_for_all(written: Written, jobs: list[subprocess.Popen[str]], ranks: int) -> None:
    """Wait until every rank has taken the last step; ranks that are away then are not waited for long."""
    until_s = time.monotonic() + LAST_S
    while time.monotonic() < until_s and any(job.poll() is None for job in jobs):
        if written.look().counts[task.ENDS] >= ranks:
            return
        time.sleep(_LOOK_S)


def _require_running(folder: Path, jobs: list[subprocess.Popen[str]]) -> None:
    """Raise LaunchError where a job has failed."""
    for job in jobs:
        if job.poll():
            raise LaunchError(f"exit code {job.returncode}: {_said(folder)}")


def _said(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("output*")))


@contextmanager
def _started(
    words: list[str], output: Path, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    with open(output, "w", encoding="utf-8") as file:
        job = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            text=True, start_new_session=True,
        )  # fmt: skip
    try:
        yield job
    finally:
        job.terminate()
        try:
            job.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
