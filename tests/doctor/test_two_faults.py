"""Two faults at once, of a list of which every pair is a case: the doctor names both, whatever one of them breaks."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import pytest

from clcomm.jobs.launch.mpiexec import MPICH, OPEN_MPI
from clcomm.tools.doctor import mpi
from tests.faults.launch import ROOT, clean_environment
from tests.launch.test_mpiexec import launcher_at


@dataclass
class Planted:
    """What the doctor's process gets: a folder first on its path, variables, limits, and the folder for `--directory`.

    Attributes:
        folder: for the files of faults.
        variables: of the process, besides those of a clean environment.
        limits: (resource, most) of the process.
        directory: where it looks for locks.
    """

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    limits: list[tuple[int, int]] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.folder / "directory"

    def hide(self, name: str) -> None:
        (self.folder / "path").mkdir(exist_ok=True)
        (self.folder / "path" / f"{name}.py").write_text("x = 1\n")

    def put_first(self) -> None:
        other = OPEN_MPI if mpi.probe()["kind"] == MPICH else MPICH
        (self.folder / "bin").mkdir()
        launcher_at(self.folder / "bin", other)

    def lock(self) -> None:
        (self.directory / ".run.npz.lock").write_text(f"process 1 on {os.uname().nodename}")


def variable(name: str, value: str) -> Callable[[Planted], object]:
    return lambda planted: planted.variables.update({name: value})


def limit(kind: int, most: int) -> Callable[[Planted], object]:
    return lambda planted: planted.limits.append((kind, most))


#: By name: how a fault is planted, and the check and words of its finding.
FAULTS: dict[str, tuple[Callable[[Planted], object], str, str]] = {
    "no seconds": (variable("CLCOMM_TIMEOUT_S", "abc"), "variables", "CLCOMM_TIMEOUT_S: expected seconds"),
    "no switch": (variable("CLCOMM_REPLAY", "maybe"), "variables", "CLCOMM_REPLAY: expected on or off"),
    "misspelt": (variable("CLCOMM_TRANSPRT", "mpi"), "variables", "CLCOMM_TRANSPRT: nothing reads"),
    "no data": (variable("CLCOMM_DATA", "/nowhere"), "variables", "CLCOMM_DATA: expected a directory"),
    "no temporary": (variable("TMPDIR", "/nowhere"), "temporary", "/nowhere cannot be used"),
    "NumPy hidden": (lambda planted: planted.hide("numpy"), "modules", "NumPy is imported from"),
    "mpi4py hidden": (lambda planted: planted.hide("mpi4py"), "modules", "mpi4py is imported from"),
    "PyOpenCL hidden": (lambda planted: planted.hide("pyopencl"), "modules", "PyOpenCL is imported from"),
    "few files": (limit(resource.RLIMIT_NOFILE, 16), "limits", "16 files may be open"),
    "no file": (limit(resource.RLIMIT_FSIZE, 0), "limits", "a file may have 0 B at most"),
    "no platform": (variable("OCL_ICD_VENDORS", "/nowhere"), "OpenCL", "no OpenCL platform"),
    "no device": (variable("CLCOMM_DEVICE", "gpu:77"), "device", "CLCOMM_DEVICE='gpu:77'"),
    "no PoCL cache": (variable("POCL_CACHE_DIR", __file__), "caches", "cannot be used: it is not a directory"),
    "another mpiexec": (Planted.put_first, "mpiexec", "every rank would be rank 0 of 1"),
    "stale lock": (Planted.lock, "locks", "is stale"),
}
#: What cannot be seen beside a fault: no device without OpenCL, no launcher to compare without mpi4py's library.
_UNSEEN = {"NumPy hidden": {"no platform", "no device"}, "PyOpenCL hidden": {"no platform", "no device"},
           "no platform": {"no device"}, "mpi4py hidden": {"another mpiexec"}}  # fmt: skip
PAIRS = [(a, b) for a, b in combinations(FAULTS, 2) if b not in _UNSEEN.get(a, ()) and a not in _UNSEEN.get(b, ())]


def examined(planted: Planted) -> tuple[dict[str, list[dict]], subprocess.CompletedProcess[str]]:
    """Return the findings by check, and the process that printed them."""
    own = clean_environment(**planted.variables)
    own["PYTHONPATH"] = os.pathsep.join([str(planted.folder / "path"), str(ROOT)])
    own["PATH"] = os.pathsep.join([str(planted.folder / "bin"), str(Path(sys.executable).parent), own["PATH"]])
    wanted = ";".join(f"resource.setrlimit({kind}, ({most}, {most}))" for kind, most in planted.limits)
    code = f"import os, resource, sys; {wanted}\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    doctor = ["-m", "clcomm", "doctor", "--json", "--directory", str(planted.directory)]
    done = subprocess.run([sys.executable, "-c", code, *doctor], capture_output=True, text=True, timeout=200, env=own,
                          cwd=planted.directory, check=False, stdin=subprocess.DEVNULL)  # fmt: skip
    assert "Traceback" not in done.stderr and done.stdout.startswith("{"), done.stderr
    found: dict[str, list[dict]] = {}
    for each in json.loads(done.stdout)["findings"]:
        found.setdefault(each["check"], []).append(each)
    return found, done


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " and ".join(pair))
def test_both_are_named(pair: tuple[str, str], tmp_path: Path) -> None:
    planted = Planted(tmp_path)
    planted.directory.mkdir()
    for name in pair:
        FAULTS[name][0](planted)
    found, done = examined(planted)
    for name in pair:
        _, check, words = FAULTS[name]
        named = [each for each in found.get(check, []) if words in each["what"]]
        assert len(named) == 1 and named[0]["level"] != "ok" and named[0]["remedy"], (name, done.stdout)
    assert done.returncode == (1 if set(pair) - {"stale lock"} else 0)
