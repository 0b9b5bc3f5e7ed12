"""Runs a part of the suite in every environment that is at hand: `python -m tests.matrix.run [PATTERN [KEPT]]`.

`make matrix` writes their table. Each environment is made anew, by uv, in a folder of its own.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.faults.launch import ROOT, clean_environment
from tests.matrix.environments import LOW, SYSTEM, Environment, environments, wheel_folders

#: What the tests need besides the package itself.
TOOLS = ("pytest>=8", "pytest-mpi>=0.6", "pytest-timeout>=2.3", "pytest-xdist>=3.5", "hypothesis>=6.100")
PLAIN = ("tests/test_models.py", "tests/engine/test_loss.py")
ON_RANKS = ("tests/test_gradient_path.py", "tests/test_optim.py")
#: In place of these two where PyTorch is in the environment.
WITH_TORCH = ("tests/torch/test_ddp.py", "tests/torch/test_async.py", "tests/torch/test_collectives.py")
RANKS = 2
TRAINING = ("-m", "examples.mnist", "--data", "digits", "--quiet", "--epochs", "20", "--target-accuracy", "0.9")
#: The rows of the last runs.
KEPT = ROOT / ".test-caches" / "matrix.json"
#: Seconds that one of them may take.
LIMIT_S = 900
_LISTED = (
    "from importlib.metadata import distributions; found = {d.name: d.version for d in distributions()}\n"
    "print(*(f'{n} {found[n]}' for n in ('numpy', 'mpi4py', 'pyopencl', 'torch') if n in found))"
)
_USED = (
    "import sys; from mpi4py import MPI; from clcomm.engine import Device\n"
    "library = MPI.Get_library_version().split(chr(10))[0].strip(chr(0))[:60]\n"
    "print(sys.version.split()[0], '|', ' '.join(library.split()), '|', Device.select().name)"
)
PAGE = """# Matrix

Taken on {machine}.

| Python | MPI | OpenCL | versions, PyTorch | what was there | outcome |
|---|---|---|---|---|---|
"""


class Outcome(NamedTuple):
    """How an environment's run ended; `problem` is "" where all passed."""

    environment: Environment
    found: str
    seconds: float
    problem: str


class Place:
    """An environment's folder and the commands within it."""

    def __init__(self, environment: Environment, folder: Path):
        self.environment, self.folder = environment, folder
        self.python = folder / "bin" / "python"
        own = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CLCOMM_ALL_CASES": "0"}
        self._variables = clean_environment(**own, **environment.variables)
        self._variables.pop("VIRTUAL_ENV", None)
        self._variables["PYTHONPATH"] = str(ROOT)
        if environment.mpi in SYSTEM:
            self._add_library()
        elif environment.library:
            self._add_opencl()
        self._variables["PATH"] = f"{folder / 'bin'}:{self._variables['PATH']}"

    def _add_library(self) -> None:
        """Give the system's MPI the name under which mpi4py looks for it; its neighbours are found beside it."""
        library, usual = Path(self.environment.library), SYSTEM[self.environment.mpi][2]
        folder = self.folder.parent / f"{self.environment.name}-mpi"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / usual).unlink(missing_ok=True)
        (folder / usual).symlink_to(library)
        self._variables["LD_LIBRARY_PATH"] = f"{folder}:{library.parent}"

    def _add_opencl(self) -> None:
        """Let OpenCL's loader find the system's runtime alone, and that the libraries it needs.

        Of the runtime's neighbours no others: among them may be a system's MPI and what belongs to it.
        """
        driver = Path(self.environment.library)
        folder = self.folder.parent / f"{self.environment.name}-opencl"
        (folder / "vendors").mkdir(parents=True, exist_ok=True)
        (folder / "vendors" / "pocl.icd").write_text(f"{driver}\n")  # by its own path: its data lie relative to it
        for needed in _needed(driver):
            (folder / needed.name).unlink(missing_ok=True)
            (folder / needed.name).symlink_to(needed)
        self._variables["OCL_ICD_VENDORS"] = str(folder / "vendors")
        self._variables["LD_LIBRARY_PATH"] = str(folder)

    def make(self) -> None:
        """Install the package, its extras and the tests' tools, unless that was done."""
        if (self.folder / "made").exists():
            return
        uv, into = [sys.executable, "-m", "uv"], ["--quiet", "--python", str(self.python)]
        lowest = ["--resolution", "lowest-direct"] if self.environment.versions == LOW else []
        self.run([*uv, "venv", "--quiet", "--python", self.environment.interpreter, str(self.folder)])
        self.run([*uv, "pip", "install", *into, *lowest, f"{ROOT}[{self.environment.extras}]"])
        self.run([*uv, "pip", "install", *into, *TOOLS])
        if self.environment.torch:
            links = [word for folder in wheel_folders() for word in ("--find-links", folder)]
            self.run([*uv, "pip", "install", *into, *links, f"torch=={self.environment.torch}"])
        self.run([*uv, "pip", "uninstall", *into, "clcomm"])  # the tests take it from the repository
        (self.folder / "made").touch()

    @property
    def mpiexec(self) -> list[str]:
        launcher = self.environment.launcher or str(self.folder / "bin" / "mpiexec")
        return [launcher, *(["--oversubscribe"] if "Open" in self.environment.mpi else []), "-n", str(RANKS)]

    def run(self, command: list[str]) -> str:
        """Run a command in the environment and return its output; CalledProcessError with it if it fails."""
        return subprocess.run(
            command, env=self._variables, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=LIMIT_S, check=True, stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip


def _needed(library: Path) -> list[Path]:
    """Return the libraries beside this one that it is linked with, as their own dependencies are."""
    found = subprocess.run(
        ["ldd", str(library)], env={**os.environ, "LD_LIBRARY_PATH": str(library.parent)},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    paths = (Path(path) for path in re.findall(r"=> (/\S+)", found))
    return [path for path in paths if path.parent == library.parent]


def run(environment: Environment, folder: Path) -> Outcome:
    """Make an environment, run the tests in it, and say how they ended."""
    began, place = time.monotonic(), Place(environment, folder)
    found = ""
    try:
        place.make()
        python = str(place.python)
        used, listed = place.run([python, "-c", _USED]), place.run([python, "-c", _LISTED])
        found = f"{used.strip().splitlines()[-1]} | {listed.strip()}"
        pytest = ["-p", "no:cacheprovider", "-x", "-v"]
        on_ranks = [*place.mpiexec, python, "-m", "mpi4py", "-m", "pytest", "--with-mpi", *pytest]
        if environment.torch:
            place.run([*on_ranks, *WITH_TORCH])
        else:
            place.run([python, "-m", "pytest", *pytest, *PLAIN])
            place.run([*on_ranks, *ON_RANKS])
            place.run([*place.mpiexec, python, *TRAINING])
        problem = ""
    except subprocess.CalledProcessError as error:
        problem = f"{' '.join(error.cmd[:6])} …\n{error.output[-3000:]}"
    except subprocess.TimeoutExpired as error:
        problem = f"{' '.join(error.cmd[:6])} … took longer than {LIMIT_S} s"
    return Outcome(environment, found, time.monotonic() - began, problem)


def page(rows: dict[str, str]) -> str:
    """Return the table; rows: each environment's, by its name."""
    machine = f"{os.cpu_count()} cores of a {platform.machine()} CPU, {platform.system()}"
    return PAGE.format(machine=machine) + "".join(
        f"{rows.get(each.name, _row(each, '', 'not run'))}\n" for each in environments()
    )


def _row(each: Environment, found: str, end: str) -> str:
    versions = f"{each.versions}, {each.torch}" if each.torch else each.versions
    return f"| {each.python} | {each.mpi} | {each.opencl} | {versions} | {found.replace('|', '·')} | {end} |"


def main(pattern: str = "", kept: str = "") -> int:
    """Run the environments whose names match, in turn, and write the table, unless it is CI; 1 if some failed.

    kept: a folder in which environments stay, and are found again; "": each is made anew and removed.

    Rows of environments that are not run now are those of the last time.
    """
    rows: dict[str, str] = {}
    ran = failed = 0
    for each in environments():
        if each.missing:
            rows[each.name] = _row(each, "", f"not at hand: {each.missing}")
        elif re.search(pattern, each.name):
            with tempfile.TemporaryDirectory(prefix="clcomm-matrix-") as folder:
                outcome = run(each, Path(kept or folder) / each.name)
            ran, failed = ran + 1, failed + bool(outcome.problem)
            rows[each.name] = _row(each, outcome.found, "failed" if outcome.problem else "passed")
            print(f"{each.name}: {outcome.problem or 'passed'}, {outcome.seconds:.0f} s; {outcome.found}", flush=True)
    KEPT.parent.mkdir(exist_ok=True)
    rows = {**(json.loads(KEPT.read_text()) if KEPT.exists() else {}), **rows}
    KEPT.write_text(json.dumps(rows))
    if os.environ.get("CI") != "true":
        (ROOT / "tests" / "proofs" / "matrix.md").write_text(page(rows))
    print(f"{ran - failed} of {ran} environments passed")
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
