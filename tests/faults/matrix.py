"""Runs the fault matrix: `python -m tests.faults.matrix [PATTERN [AT ONCE]]`; `make faults` writes its tables.

Where the system allows it, each job has temporary mounts of its own: a /dev/shm, to check for files that it leaves
there, and a disk for its checkpoints in the cases where that fails. Elsewhere these checks and cases are skipped.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from clcomm.jobs.checkpoint import load
from tests.faults.cases import SAVED, STALL_WARNING_S, TIMEOUT_S, Case, all_cases
from tests.faults.elastic_runs import find_mpiexec
from tests.faults.file_cases import FileCase, file_cases
from tests.faults.file_jobs import forget_kernels, run_file_case
from tests.faults.launch import ROOT, clean_environment, mpiexec
from tests.faults.pace import Pace
from tests.faults.page import Row, page
from tests.faults.start_cases import start_cases
from tests.multihost.two_hosts import TwoHosts

#: How long a job may take on a busy machine before it counts as hung, and its processes after its end.
LIMIT_S, GONE_S = 120.0, 5.0
#: Runs the job within its own mounts, and copies the files on its disk before it is unmounted.
_IN_OWN_MOUNTS = """
mount -t tmpfs -o size=64m clcomm-faults /dev/shm || exit 99
if [ "$DISK" ]; then mount -t tmpfs -o "$DISK" clcomm-faults "$CLCOMM_TEST_DIR" || exit 99; fi
"$@"
code=$?
ls -A /dev/shm > "$LEFT"
if [ "$DISK" ]; then cp -a "$CLCOMM_TEST_DIR"/. "$0"; fi
exit $code
"""


@dataclass
class Outcome:
    """The end of a case; `problems` is empty if it is as expected."""

    case: Case
    code: int
    output: str
    problems: list[str] = field(default_factory=list)

    def first_line(self) -> str:
        """Return the line that the user reads first, with rank and cause."""
        begins = re.compile("clcomm|WARNING clcomm|kernel cache|finished|YOUR APP")
        return next((line for line in self.output.splitlines() if begins.match(line)), "")


@dataclass(frozen=True)
class Undisturbed:
    """The result of a job without any fault, and its checkpoints."""

    result: str
    files: Path


@functools.cache
def undisturbed(ranks: int = 2) -> Undisturbed:
    """Run the job once without a fault."""
    directory = Path(tempfile.mkdtemp(prefix="clcomm-faults-"))
    case = Case("nothing", "exit", 0, "", 0, ranks=ranks)
    code, output, _ = _run(case, directory)
    found = re.search(r"finished from step 0 with (\S+)", output)
    assert code == 0 and found, output
    return Undisturbed(found[1], directory)


def run_case(case: Case, directory: Path, pace: Pace | None = None) -> Outcome:
    """Run a case in a directory of its own and check its end and files; time limits are scaled by `pace`, if given."""
    if isinstance(case, FileCase):
        if not _own_mounts():
            return Outcome(case, 0, "clcomm was not tried: it needs mounts of its own, which the system refuses")
        return Outcome(case, *run_file_case(case, directory, _own_mounts()))
    expected = undisturbed(case.ranks if case.survives else 2)
    if case.ulfm and openmpi() is None:
        return Outcome(case, 0, "clcomm was not tried: it needs Open MPI, whose Python CLCOMM_TEST_OPENMPI names")
    if (case.disk or case.damage == "shm") and not _own_mounts():
        return Outcome(case, 0, "clcomm was not tried: it needs mounts of its own, which the system refuses")
    if case.damage in ("cut", "flip") and not _build_kernels(directory):
        return Outcome(case, 0, "clcomm was not tried: it needs a PoCL that keeps kernels in files")
    _damage(case, expected.files, directory)
    code, output, seconds = _run(case, directory)
    outcome = Outcome(case, code, output)
    problems = outcome.problems
    if seconds is None:
        problems.append("it hung")
    elif not case.survives and not case.damage and seconds > case.within_s * (pace.slowdown() if pace else 1):
        problems.append(f"it ended {seconds:.1f} s after the fault")
    if (code == 0) != case.survives or case.code not in (None, code):
        problems.append(f"exit code {code}, expected {'any but 0' if case.code is None else case.code}")
    if not re.search(case.pattern.replace("{rank}", str(case.rank)), output):
        problems.append(f"its output has no {case.pattern!r}")
    if output.count("RuntimeError: planted") > 1:
        problems.append("the message appears several times")
    if case.survives and f"with {expected.result}\n" not in output:
        problems.append("its result is another")
    problems += _what_is_saved(case, directory) + _what_is_left(case, directory)
    return outcome


def _run(case: Case, directory: Path) -> tuple[int, str, float | None]:
    """Return exit code, all output, and the seconds from the fault to the end; None where it had to be killed."""
    place = directory / "disk" if case.disk else directory
    place.mkdir(exist_ok=True)
    if case.two_hosts:
        with TwoHosts() as hosts:
            return _run_with(hosts.command((case.ranks // 2, case.ranks // 2), []), case, directory, place)
    return _run_with(_launch(case), case, directory, place)


def _run_with(launch: list[str], case: Case, directory: Path, place: Path) -> tuple[int, str, float | None]:
    command = [*launch, str(ROOT / "tests" / "faults" / "victim.py")]
    if _own_mounts():
        command = [*_own_mounts(), "sh", "-c", _IN_OWN_MOUNTS, str(directory), *command]
    environment = {"CLCOMM_TEST_FAULT": case.planted, "CLCOMM_TEST_DIR": str(place), "LEFT": str(directory / "left")}
    if not case.survives:  # a job that has to finish may take longer
        environment |= {"CLCOMM_STALL_WARNING_S": str(STALL_WARNING_S), "CLCOMM_TIMEOUT_S": str(TIMEOUT_S)}
    environment |= {"DISK": case.disk, "POCL_CACHE_DIR": str(directory / "kernels"), "POCL_DEVICES": "basic"}
    process = subprocess.Popen(
        command, env=clean_environment(**environment, CLCOMM_TEST_ID=str(directory), OMP_NUM_THREADS="1"), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    try:
        output = process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait(), process.communicate()[0], None
    now = time.monotonic()
    stamps = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("failing at")]
    return process.returncode, output, now - max(stamps, default=now)


def _launch(case: Case) -> list[str]:
    """Return the command that runs a Python program on a case's ranks."""
    if not case.ulfm:
        return [mpiexec(), "-n", str(case.ranks), sys.executable]
    python = openmpi()
    assert python is not None
    return [
        str(python.with_name("mpiexec")),
        "--with-ft",
        "ulfm",
        "--oversubscribe",
        "-n",
        str(case.ranks),
        str(python),
    ]


@functools.cache
def openmpi() -> Path | None:
    """Return the Python of an environment that has Open MPI 5: CLCOMM_TEST_OPENMPI, or this one; None without."""
    for python in map(Path, (os.environ.get("CLCOMM_TEST_OPENMPI", ""), sys.executable)):
        if find_mpiexec(python):
            return python.absolute()
    return None


@functools.cache
def _own_mounts() -> tuple[str, ...]:
    """Return the command under which a job has mounts of its own; empty if the system refuses them."""
    for options in (("--mount",), ("--map-root-user", "--mount")):
        tried = ["unshare", *options, "sh", "-c", "mount -t tmpfs clcomm-faults /dev/shm"]
        if shutil.which("unshare") and subprocess.run(tried, capture_output=True, check=False).returncode == 0:
            return "unshare", *options
    return ()


def _built(directory: Path) -> list[Path]:
    return sorted([*directory.glob("kernels/**/*.so"), *directory.glob("kernels/**/*.bc")])


def _build_kernels(directory: Path) -> bool:
    """Fill a kernel cache by a first job; return whether there are files in it."""
    code, output, _ = _run(Case("cold kernel cache", "start-up", 0, "", 0), directory)
    assert code == 0, output
    for path in directory.glob("run.npz*"):
        path.unlink()
    return bool(_built(directory))


def _damage(case: Case, files: Path, directory: Path) -> None:
    if case.damage in ("newest", "all"):
        for number, name in enumerate(("run.npz", "run.npz.1")):
            content = (files / name).read_bytes()
            whole = number and case.damage == "newest"
            (directory / name).write_bytes(content if whole else content[: len(content) // 2])
    if case.damage in ("cut", "flip"):
        for path in _built(directory)[::2]:
            _spoil(path, case.damage)


def _spoil(path: Path, damage: str) -> None:
    """Cut a file in half, or flip bits in its middle and keep the modification time, as a failing disk does."""
    status, content = path.stat(), bytearray(path.read_bytes())
    half = len(content) // 2
    content[half : half + 64] = bytes(255 - byte for byte in content[half : half + 64])
    path.write_bytes(content[:half] if damage == "cut" else content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _what_is_saved(case: Case, directory: Path) -> list[str]:
    least = 0 if case.damage or case.disk == "ro" else SAVED[case.place]
    if not least:
        return []
    step = load(directory / "run.npz").facts["step"]  # raises if it is not complete
    return [f"the newest checkpoint is of step {step}, expected {least} or later"] if step < least else []


def _what_is_left(case: Case, directory: Path) -> list[str]:
    deadline = time.monotonic() + GONE_S
    while (left := _processes(directory)) and time.monotonic() < deadline:
        time.sleep(0.02)
    problems = [f"processes are left: {left}"] if left else []
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if _own_mounts():
        listed = directory / "left"  # missing after a job that hung
        files = listed.read_text().split() if listed.exists() else []
        problems += [f"/dev/shm holds {name}" for name in files if not re.fullmatch(case.leaves, name)]
    if case.disk:
        # The ranks' devices sum, and their kernels' cache is there (see the environment).
        ours = {"run.npz", "run.npz.1", ".run.npz.lock", "filler", "left", "disk", "kernels"}
        kept = {path.name for path in directory.iterdir()} - ours
        problems += [f"the disk holds {name}" for name in sorted(kept)]
    return problems


def _processes(directory: Path) -> list[int]:
    """Return the processes of a case's job, by their environment."""
    mark, found = f"CLCOMM_TEST_ID={directory}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def row(outcome: Outcome) -> Row:
    """Return a case's end for the tables: its first line without folders."""
    return Row(outcome.case.fault, outcome.code, re.sub(r"/\S*/", "", outcome.first_line()))


def report(case: Case) -> Outcome:
    """Run a case and print how it ended."""
    with tempfile.TemporaryDirectory(prefix="clcomm-faults-") as directory:
        outcome = run_case(case, Path(directory))
    words = f"{case.name}: {'; '.join(outcome.problems) or 'as it has to be'}"
    print(words + (f"\n{outcome.output}" if outcome.problems else ""), flush=True)
    return outcome


def every_case() -> list[Case]:
    """Return the whole matrix: faults of ranks, and of a job's files and start."""
    return all_cases() + file_cases() + start_cases()


def main(pattern: str = "", at_once: str = "1") -> int:
    """Run the cases whose names match the pattern; for "" run all and write the tables; return 1 if some fail."""
    undisturbed()
    with ThreadPoolExecutor(int(at_once)) as pool:
        outcomes = list(pool.map(report, [case for case in every_case() if re.search(pattern, case.name)]))
    forget_kernels()
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    print(f"{len(outcomes) - failed} of {len(outcomes)} as they have to be")
    if not pattern:
        (ROOT / "tests" / "proofs" / "faults.md").write_text(page("Faults", list(map(row, outcomes))))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
