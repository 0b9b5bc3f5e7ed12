"""Runs the cases of tests/faults/file_cases.py, and checks the files that each job leaves."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.faults.file_cases import SMALL, FileCase
from tests.faults.launch import ROOT, clean_environment, mpiexec
from tests.special_files import make

#: How long a job may take on a busy machine before it counts as hung.
LIMIT_S = 120.0
_IN_OWN_MOUNTS = """
mount -t tmpfs -o size=256m clcomm-faults /dev/shm || exit 99
if [ "$SMALL" ]; then mount -t tmpfs -o "size=$SMALL" clcomm-faults "$SMALL_DIR" || exit 99; fi
exec "$@"
"""


def run_file_case(case: FileCase, directory: Path, mounts: tuple[str, ...]) -> tuple[int, str, list[str]]:
    """Run a case in a directory of its own; return exit code, output and their problems.

    mounts: the command under which a job has mounts of its own.
    """
    there, small, open_to_all = (directory / name for name in ("there", "small", "open"))
    for folder in (there, small, open_to_all):
        folder.mkdir()
    open_to_all.chmod(0o777)
    places = dict(zip(("{small}", "{open}", "{dir}"), map(str, (small, open_to_all, directory)), strict=True))
    places["{at}"] = str(make(case.kind, there))
    before = _state(there)
    code, output = _run(case, places, mounts)
    problems = [] if code == case.code else [f"exit code {code}, expected {case.code}"]
    if not re.search(case.pattern, output):
        problems.append(f"its output has no {case.pattern!r}")
    if "Traceback" in output:
        problems.append("it shows a traceback")
    if case.kind and _state(there) != before:
        problems.append("the file is no longer what it was")
    return code, output, problems


def _run(case: FileCase, places: dict[str, str], mounts: tuple[str, ...]) -> tuple[int, str]:
    def placed(text: str) -> str:
        return functools.reduce(lambda filled, name: filled.replace(name, places[name]), places, text)

    program = [sys.executable, "-m", "examples.mnist", *SMALL, *map(placed, case.arguments)]
    command = [mpiexec(), "-n", "2", *program]
    if case.of_rank_1:
        command = [mpiexec(), "-n", "1", *program, ":", "-n", "1", *program, *map(placed, case.of_rank_1)]
    command = [*mounts, "sh", "-c", _IN_OWN_MOUNTS, "sh", *command]
    environment = clean_environment(
        POCL_CACHE_DIR=str(kernels()), SMALL=case.small, SMALL_DIR=places["{small}"],
        OMP_NUM_THREADS="1", COLUMNS="200",
    )  # fmt: skip
    for name, value in case.environment.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = placed(value)
    process = subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    try:
        output = process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return 124, process.communicate()[0] + "it hung"
    return process.returncode, output


@functools.cache
def kernels() -> Path:
    """Return a cache that holds the kernels of these jobs, so that each takes a second."""
    directory = Path(tempfile.mkdtemp(prefix="clcomm-faults-kernels-"))
    command = [mpiexec(), "-n", "2", sys.executable, "-m", "examples.mnist", *SMALL]
    environment = clean_environment(POCL_CACHE_DIR=str(directory), OMP_NUM_THREADS="1")
    subprocess.run(command, env=environment, capture_output=True, stdin=subprocess.DEVNULL, check=True, cwd=ROOT)
    return directory


def forget_kernels() -> None:
    """Remove that cache, if there is one."""
    if kernels.cache_info().currsize:
        shutil.rmtree(kernels())
        kernels.cache_clear()


def _state(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((path.name, stat.S_IFMT(path.lstat().st_mode), path.lstat().st_ino) for path in folder.rglob("*"))
