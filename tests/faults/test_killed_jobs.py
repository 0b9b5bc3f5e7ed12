"""Nothing of a job outlives whoever started it, and whoever ends a job removes what its processes have made.

CLCOMM_KILLED_JOBS is how many drawn cases to run, CLCOMM_KILLED_JOBS_SEED where the draw begins; `make killed-jobs`
runs 200.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clcomm.base.host.host_processes import Made, has
from clcomm.base.host.host_processes import processes as all_processes
from clcomm.comm.watch import worlds
from clcomm.jobs.launch.keeper import kept_job
from clcomm.jobs.launch.keeper_process import end_processes
from tests.faults.killed_jobs import COMMANDS, GONE_S, HUNG_S, KilledJob, command_line, draw, own_memory, run, until
from tests.faults.launch import clean_environment, mpiexec
from tests.leftovers import kill_with_descendants

CASES, SEED = int(os.environ.get("CLCOMM_KILLED_JOBS", "3")), os.environ.get("CLCOMM_KILLED_JOBS_SEED", "1")
MEMORY = Path("/dev/shm")
#: A program that makes the files that it is told in shared memory, maps them, says so, and waits.
HOLDS = """
import mmap, sys, time
held = []
for path in sys.argv[1:]:
    with open(path, "a+b") as file:
        file.truncate(4096)
        held.append(mmap.mmap(file.fileno(), 4096))
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.sampled(CASES)
@pytest.mark.parametrize("number", range(CASES))
def test_a_drawn_process_is_killed_and_nothing_is_left(tmp_path: Path, number: int):
    case = draw(random.Random(f"{SEED} {number}"))
    found = run(case, tmp_path)
    assert not found.problem, f"{case}: {found.problem}"


def started(environment: dict[str, str], *paths: Path, program: str = HOLDS) -> subprocess.Popen:
    command = [sys.executable, "-c", program, *map(str, paths)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def named(kind: str) -> Path:
    return MEMORY / f"{kind}{secrets.token_hex(6)}"


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_an_exception_of_whoever_started_a_job_ends_it():
    with pytest.raises(ZeroDivisionError), kept_job() as keeper:
        process = started(keeper.environment())
        raise ZeroDivisionError
    try:
        assert process.wait(60) == -9 and not keeper.folder.exists()
    finally:
        end(process)


@pytest.mark.parametrize("kind", ["mpich_shar_tmp", "mpich_shm_", "mpich_vci_", "sm_segment.", "osc_sm."])
def test_what_a_killed_process_made_goes_too(kind: str):
    mine, theirs, setting = named(kind), named(kind), f"TESTS_JOB={secrets.token_hex(6)}"
    made = Made()
    name, _, value = setting.partition("=")
    processes = [started({**os.environ, name: value}, mine), started(dict(os.environ), theirs)]
    try:
        made.note(filter(has(setting), all_processes()))
        for process in processes:
            end(process)
        assert made.names == {mine.name} and end_processes([setting], made) == 0
        assert [mine.exists(), theirs.exists()] == [False, True]
    finally:
        for process, path in zip(processes, (mine, theirs), strict=True):
            end(process)
            path.unlink(missing_ok=True)


#: A launcher: other children, and in a process group of its own one that makes a file once it goes on after a stop.
STOPPED = """
import os, signal, subprocess, sys, time
others = [subprocess.Popen(["sleep", "600"]) for _ in range(100)]
if not os.fork():
    os.setpgid(0, 0)
    def make(number, frame):
        kept.append(open(sys.argv[1], "w"))
        os._exit(0)
    kept = [signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGCONT, make)]
    print("held", flush=True)
while True:
    time.sleep(600)
"""
#: A process that ends by itself, and has a file just before.
ENDS_ITSELF = """
import os, signal, sys, time
print("held", flush=True)
file = open(sys.argv[1], "w")
time.sleep(2)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("program", "patience_s"), [(STOPPED, 0.0), (ENDS_ITSELF, 60.0)], ids=["killed", "ends"])
def test_what_processes_make_while_they_are_ended_goes_too(program: str, patience_s: float):
    """Where a stopped process's parent is killed before it the system lets it go on."""
    path, value = named("mpich_shm_"), secrets.token_hex(6)
    made = Made()
    process = started({**os.environ, "TESTS_JOB": value}, path, program=program)
    try:
        end_processes([f"TESTS_JOB={value}"], made, patience_s)
        assert process.wait(60) == -9 and not path.exists()
    finally:
        end(process)
        path.unlink(missing_ok=True)


#: A rank that kills itself once it has made or opened MPI's file in shared memory: in MPI_Init, or after that.
KILLS_ITSELF = """
import os, sys, time
import clcomm.comm.communicator
victim, moment, number, own = *map(int, sys.argv[1:]), os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]

def holds(process):
    named = "/dev/shm/mpich_", "/dev/shm/sm_segment"
    return any(name in line and "deleted" not in line for line in open(f"/proc/{process}/maps") for name in named)

def kill(process):
    while not holds(process):
        time.sleep(0.001)
    time.sleep(0.2)
    os.kill(process, number)

if victim == int(own) and moment == 0 and not os.fork():
    kill(os.getppid())
    os._exit(0)
from mpi4py import MPI
if victim == int(own):
    kill(os.getpid())
clcomm.comm.communicator.Communicator()
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(12))
def test_a_rank_of_mpiexec_that_dies_before_its_communicator_leaves_nothing_in_shared_memory(number: int):
    if not own_memory():
        pytest.skip("needs a /dev/shm of its own")
    draw = random.Random(number)
    ranks = draw.randint(2, 3)  # a job of one rank needs no MPI
    words = [draw.randrange(ranks), number % 2, draw.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])]
    mount = 'mount -t tmpfs none /dev/shm && echo $$ && "$@"; echo ended; read line'
    job = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", mount, "sh", mpiexec(), "-n", str(ranks), sys.executable, "-c", KILLS_ITSELF,
         *map(str, words)], env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert job.stdout is not None
        memory = Path(f"/proc/{int(job.stdout.readline())}/root/dev/shm")
        while job.stdout.readline() != "ended\n":
            assert job.poll() is None
        assert until(lambda: not os.listdir(memory), GONE_S), (ranks, words, os.listdir(memory))
    finally:
        kill_with_descendants(job.pid)
        job.communicate()


@pytest.mark.parametrize("initialize", [True, False])
def test_a_rank_whose_launcher_has_ended_leaves_no_folder_of_mpis(tmp_path: Path, initialize: bool):
    """It starts MPI as a process without a launcher does, which makes a folder in TMPDIR."""
    folders = [tmp_path / name for name in ("job", "tmp")]
    for folder in folders:
        folder.mkdir()
    program = (
        "import mpi4py, os; from clcomm.comm.transport.mpi_runtime import load_mpi\n"
        f"mpi4py.rc.initialize = {initialize}; load_mpi(); print(os.environ['TMPDIR'], flush=True); os._exit(0)"
    )
    environment = clean_environment(TMPDIR=str(folders[1]), CLCOMM_JOB_FOLDER=str(folders[0]))
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert (said.stdout.split(), list(folders[1].iterdir())) == ([str(folders[1])], [])


def test_what_a_job_made_in_shared_memory_goes_with_it_and_nothing_else():
    """Not what others use, what others made, or other names."""
    mine, theirs = named("mpich_shar_tmp"), named("psm_")
    shared, other = named("psm_"), named("mine_")
    outside = started(dict(os.environ), theirs, shared)
    processes = [outside]
    try:
        with kept_job() as keeper:
            processes.append(started(keeper.environment(), mine, shared, other))
            keeper.end(patience_s=0.0)
        assert [path.exists() for path in (mine, theirs, shared, other)] == [False, True, True, True]
        assert outside.poll() is None and processes[1].wait(60) == -9
    finally:
        for process in processes:
            end(process)
        for path in (mine, theirs, shared, other):
            path.unlink(missing_ok=True)


def test_only_the_start_that_is_meant_is_ended():
    with kept_job() as keeper, kept_job() as another:
        processes = [started(keeper.environment(0)), started(keeper.environment(1)), started(another.environment(0))]
        try:
            keeper.end(0, patience_s=0.0)
            assert processes[0].wait(60) == -9 and [each.poll() for each in processes[1:]] == [None, None]
            keeper._process.kill()  # another takes its place
            keeper._process.wait()
            keeper.end(1, patience_s=0.0)
            assert processes[1].wait(60) == -9 and processes[2].poll() is None
        finally:
            for process in processes:
                end(process)


#: Ends the processes that have a setting, with so many descriptors free, and says how many; or the error.
ENDS = """
import os, resource, sys
from clcomm.base.host.host_processes import Made
from clcomm.jobs.launch.keeper_process import end_processes
free, next_one = int(sys.argv[1]), os.dup(0)
resource.setrlimit(resource.RLIMIT_NOFILE, (next_one + free, next_one + free))
os.close(next_one)
try:
    print(end_processes([sys.argv[2]], Made()))
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize("free", [0, 3, 7, 40])
def test_without_free_descriptors_no_process_is_taken_for_ended(free: int):
    name, value = "TESTS_JOB", secrets.token_hex(6)
    processes = [started({**os.environ, name: value}) for _ in range(7)]
    try:
        command = [sys.executable, "-c", ENDS, str(free), f"{name}={value}"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()
        assert said == ("7" if free > 3 else "Too many open files")
        assert [each.poll() is None for each in processes] == [free <= 3] * 7
    finally:
        for process in processes:
            end(process)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(20))
def test_a_job_without_free_descriptors_is_one_line(tmp_path: Path, number: int):
    draw = random.Random(number)
    command = draw.choice([name for name in COMMANDS if name != "hosts"])
    (tmp_path / "job.py").write_text("raise SystemExit('started')")
    limit = f'ulimit -n {draw.randint(6, 60)}; exec "$@"'
    ended = subprocess.run(
        ["sh", "-c", limit, "sh", *command_line(command)], cwd=tmp_path, env=clean_environment(),
        capture_output=True, text=True, timeout=HUNG_S, check=False,
    )  # fmt: skip
    lines = ended.stderr.splitlines()[command == "plan" :]  # which first says what it does
    assert (ended.returncode, ended.stdout, len(lines)) == (1, "", 1), (command, limit, ended)
    assert lines[0].startswith("clcomm: ulimit -n: expected 64 more files"), (command, limit, ended)


@pytest.mark.parametrize("seed", range(20))
def test_a_word_that_no_rank_wrote_is_none(seed: int):
    rng = random.Random(seed)
    good = [worlds.JOINED, worlds.COPIED, worlds.STOPPED, worlds.RESIZE]
    for _ in range(200):
        line = f"{rng.choice(good)} {rng.randrange(9)} {rng.randrange(10**6)}".encode()
        word, world, value = line.split()
        assert worlds.read(line) == (word.decode(), int(world), int(value))
        place = rng.randrange(len(line))
        junk = rng.choice([b"\xff", b" ", b"-", "²".encode(), b"\0", b"9" * 5000, b"x x"])
        changed = worlds.read(line[:place] + junk + line[place:])
        assert changed is None or (len(changed) == 3 and changed[0].isalpha())
        assert worlds.read(line[:place] + b"\xff" + line[place + 1 :]) is None


@pytest.mark.parametrize("seed", [1])
def test_clcomm_run_survives_any_words_on_its_pipe(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    job = KilledJob("min-ranks", tmp_path, 60)
    try:
        place = MEMORY if job.memory < 0 else Path(f"/proc/self/fd/{job.memory}")
        folders: list[Path] = []

        def is_open() -> bool:
            folders[:] = place.glob("clcomm-memory-*/words")
            return bool(folders) or job.process.poll() is not None

        assert until(is_open) and folders
        lines = b"\xff\xfe", b"joined", b"copied 0 x", b"resize 0 " + b"9" * 5000, b"", b" ", rng.randbytes(500)
        for junk in (line + b"\n" for line in lines):
            with folders[0].open("wb", buffering=0) as words:
                words.write(junk)
        assert job.process.wait(120) == 0, job.text()
        assert until(lambda: not job.left()), job.left()
    finally:
        job.close()
