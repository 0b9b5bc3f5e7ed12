"""Modules: the packages that Python imports, files that hide them, and versions, the same on every rank."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from clcomm._version import __version__
from clcomm.base.console.finding import Finding, note, ok, problem
from clcomm.base.errors import name_ranks
from clcomm.tools.doctor.job import Facts, JobFacts

#: The packages of every installation, as they are imported and as they are called.
PACKAGES = {"numpy": "NumPy", "mpi4py": "mpi4py", "pyopencl": "PyOpenCL", "rich": "Rich"}
#: The checks that fail for lack of a package, whatever else they say.
_NEED = {
    "numpy": ("start", "OpenCL", "device"), "mpi4py": ("MPI", "start"), "pyopencl": ("OpenCL", "device"),
}  # fmt: skip
#: Packages whose versions matter, as they are called here and in their metadata.
_VERSIONED = {"NumPy": "numpy", "mpi4py": "mpi4py", "PyOpenCL": "pyopencl", "PoCL": "pocl-binary-distribution"}
#: How many numbers of a version have to be equal for a job to start (clcomm/comm/collectives/same_start.py).
_REQUIRED = {"clcomm": 9, "Python": 2, "NumPy": 2, "mpi4py": 1}
_REMEDY = "install the same versions for all ranks, for instance from one requirements file: pip install -r"


def probe(directory: str) -> dict[str, object]:
    """Return where each package is imported from and where it is installed, and what would hide one in a directory.

    directory: in which programs are started, so that their modules come before those that are installed.
    """
    found = {name: {"from": _origin(name), "installed": _installed(name)} for name in PACKAGES}
    return {"packages": found, "numpy": numpy_failure(), "here": _hiding(Path(os.path.abspath(directory)))}


def numpy_failure() -> str:
    """Return why NumPy cannot be used; "" if it can. Without it little of clcomm can be imported."""
    try:
        import numpy

        numpy.dtype  # noqa: B018 - another module of this name has none
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return ""


def _origin(name: str) -> str:
    """Return the file that `import name` runs; "" if there is none."""
    try:
        spec = PathFinder.find_spec(name) or find_spec(name)  # the second knows packages installed in their sources
    except (ImportError, ValueError):
        return ""
    return os.path.realpath(spec.origin) if spec is not None and spec.origin else ""


def _installed(name: str) -> str:
    """Return the folder of an installed package; "" if it is not installed, or in a way of its own."""
    try:
        folder = os.path.realpath(str(metadata.distribution(name).locate_file(name)))
    except metadata.PackageNotFoundError:
        return ""
    return folder if os.path.isdir(folder) else ""


def _hiding(directory: Path) -> list[str]:
    """Return the files in a directory that hide a package, or a module of Python's own that is in use."""
    names = sorted({*PACKAGES, *(sys.stdlib_module_names & sys.modules.keys())} - {"__main__"})
    files = [file for name in names for file in (directory / f"{name}.py", directory / name / "__init__.py")]
    return [str(file) for file in files if file.is_file()]


def broken(job: JobFacts) -> set[str]:
    """Return the packages that some rank does not import as they are installed."""
    found: set[str] = set()
    for facts in job.of("modules").values():
        found |= {name for name, its in facts["packages"].items() if _is_hidden(its) or not its["from"]}
        found |= {"numpy"} if facts["numpy"] else set()
        found |= {name for name in PACKAGES for path in facts["here"] if _module_of(path) == name}
    return found


def blamed(job: JobFacts) -> set[str]:
    """Return the checks that cannot succeed before the modules are right."""
    return {check for name in broken(job) for check in _NEED.get(name, ())}


def _is_hidden(its: Facts) -> bool:
    return bool(its["from"] and its["installed"]) and not its["from"].startswith(its["installed"] + os.sep)


def _module_of(path: str) -> str:
    """Return the module's name: of numpy.py and of numpy/__init__.py it is "numpy"."""
    file = Path(path)
    return file.parent.name if file.name == "__init__.py" else file.stem


def check(job: JobFacts) -> Iterator[Finding]:
    """Judge the modules of all ranks, each statement once with the ranks that it is about."""
    said: dict[tuple[str, str], list[int]] = {}
    everyone = job.of("modules")
    for rank, facts in everyone.items():
        for statement in _statements(facts):
            said.setdefault(statement, []).append(rank)
    for (what, remedy), ranks in said.items():
        yield problem("modules", f"{job.who(ranks)}{what}", remedy, ranks=ranks)
    if everyone and not said:
        folders = {os.path.dirname(its["installed"]) for facts in everyone.values()
                   for its in facts["packages"].values() if its["installed"]}  # fmt: skip
        yield ok("modules", f"imported from {', '.join(sorted(folders)) or 'where they are installed'}")


def _statements(facts: Facts) -> Iterator[tuple[str, str]]:
    hidden = set()
    for name, its in facts["packages"].items():
        if not its["from"]:
            yield f"{sys.executable} has no {PACKAGES[name]}", f"{sys.executable} -m pip install {name}"
        elif _is_hidden(its):
            hidden.add(its["from"])
            yield (
                f"{PACKAGES[name]} is imported from {its['from']}, not from the package in {its['installed']}",
                f"rename {its['from']}, or take its folder out of PYTHONPATH",
            )
    its = facts["packages"]["numpy"]
    if facts["numpy"] and its["from"] and its["from"] not in hidden:
        yield f"NumPy cannot be imported: {facts['numpy']}", "pip install --force-reinstall numpy"
    for path in facts["here"]:
        if os.path.realpath(path) not in hidden:
            own = PACKAGES.get(_module_of(path), f"Python's own module {_module_of(path)}")
            yield f"{path} hides {own} from programs that are started there", f"rename {path}"


def probe_versions() -> dict[str, object]:
    """Return versions by name; "none" for a package that is not installed."""
    found = {"clcomm": __version__, "Python": platform.python_version(), "machine": os.uname().machine}
    for name, package in _VERSIONED.items():
        found[name] = "none"
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(package)
    return {"versions": found, "byte order": sys.byteorder}


def check_versions(job: JobFacts) -> Iterator[Finding]:
    """Compare the ranks' versions, as a job does when it starts."""
    found = job.of("versions")
    everyone = {rank: facts["versions"] for rank, facts in found.items()}
    if not everyone:
        return
    names = list(next(iter(everyone.values())))
    differing = False
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, versions in everyone.items():
            ranks.setdefault(versions.get(name, "none"), []).append(rank)
        if len(ranks) == 1:
            continue
        differing = True
        values = ", ".join(f"{version} on {name_ranks(own)}" for version, own in ranks.items())
        numbers = _REQUIRED.get(name)
        stops = numbers is not None and len({tuple(version.split(".")[:numbers]) for version in ranks}) > 1
        what = f"{name}: {values}" + ("; such a job does not start" if stops else "")
        yield (problem if stops else note)("versions", what, _REMEDY, versions=dict(ranks))
    if not differing:
        first = next(iter(everyone.values()))
        shown = ", ".join(f"{name} {version}" for name, version in first.items() if name != "machine")
        yield ok("versions", f"{shown}; {first['machine']}", versions=first)
