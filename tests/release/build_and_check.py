"""Builds a release and checks it: `python -m tests.release.build_and_check DIST`; `make release`. It uploads nothing.

Checked are the version's section in the changelog, the metadata, what wheel and sdist hold, that the sdist builds the
same wheel, and that the wheel works in an environment with nothing else.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import numpy as np
from clcomm import Communicator
from clcomm.engine import Tensor

with Communicator() as comm:
    total = comm.all_reduce(np.full(3, comm.rank + 1.0))
    product = (Tensor(np.ones((2, 3), np.float32)) @ Tensor(np.ones((3, 2), np.float32))).numpy()
    print(comm.size, total.tolist(), product.sum())
"""


def version() -> str:
    """Return the version in the sources."""
    found = re.search(r'__version__ = "(.+)"', (ROOT / "clcomm" / "_version.py").read_text())
    assert found is not None
    return found[1]


def section(changelog: str, name: str) -> str:
    """Return "dated", "unreleased" or "missing": how a changelog's first section names this version."""
    found = re.search(r"^## (\S+), (.+)$", changelog, re.MULTILINE)
    if found is None or found[1] != name:
        return "missing"
    return "dated" if re.fullmatch(r"\d{4}-\d\d-\d\d", found[2]) else found[2]


def contents(path: Path) -> set[str]:
    """Return the files of a wheel, or of an sdist without its top folder."""
    if path.suffix == ".whl":
        return set(zipfile.ZipFile(path).namelist())
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def package_files() -> set[str]:
    """Return the package's files that git knows."""
    listed = subprocess.run(["git", "ls-files", "clcomm"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split() if name.endswith((".py", ".cl", ".css", ".js", "py.typed"))}


def run(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command and return what it printed; end the program with that if it fails."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        command, cwd=cwd, env={**variables, **environment}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def build(source: Path, into: Path, *what: str) -> list[Path]:
    """Build from a folder or an sdist, in an isolated environment; return the files."""
    run(sys.executable, "-m", "build", *what, "--outdir", str(into), str(source))
    return sorted(into.iterdir())


def require_package(path: Path) -> None:
    """Exit unless an archive holds the package's files, whole, and of a wheel nothing else."""
    expected, found = package_files(), contents(path)
    if expected - found:
        sys.exit(f"{path.name} lacks {sorted(expected - found)}")
    others = {name for name in found - expected if ".dist-info/" not in name} if path.suffix == ".whl" else set()
    if others:
        sys.exit(f"{path.name} holds {sorted(others)} too")


def require_works_alone(wheel: Path) -> None:
    """Exit unless the wheel, in an environment of its own, imports, says its version, and runs on two ranks."""
    with tempfile.TemporaryDirectory(prefix="clcomm-release-") as folder:
        place = Path(folder)
        run(sys.executable, "-m", "venv", str(place / "env"))
        python = str(place / "env" / "bin" / "python")
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[mpich,pocl]")
        (place / "empty").mkdir()
        (place / "empty" / "job.py").write_text(PROGRAM)
        command = str(place / "env" / "bin" / "clcomm")
        said = run(command, "--version", cwd=place / "empty")
        if said.strip() != f"clcomm {version()}" or "run" not in run(command, "--help", cwd=place / "empty"):
            sys.exit(f"clcomm --version said {said!r}")
        said = run(command, "run", "-n", "2", "job.py", cwd=place / "empty", OMP_NUM_THREADS="1")
        if said.splitlines() != ["2 [3.0, 3.0, 3.0] 12.0"] * 2:
            sys.exit(f"two ranks said {said!r}")


def main(into: str) -> None:
    """Build into a folder, which must be empty, and check."""
    dist = Path(into).absolute()
    if dist.exists() and any(dist.iterdir()):
        sys.exit(f"DIST: expected an empty folder, got {into}, which holds files; make clean removes them")
    state = section((ROOT / "CHANGELOG.md").read_text(), version())
    if state == "missing":
        sys.exit(f"CHANGELOG.md: expected {version()} in its first heading")
    if run("git", "status", "--porcelain").strip():
        sys.exit("git: expected a tree without changes; commit or stash them")
    with tempfile.TemporaryDirectory(prefix="clcomm-release-") as folder:
        tree = Path(folder) / "tree"
        run("git", "clone", "--quiet", str(ROOT), str(tree))
        sdist, wheel = sorted(build(tree, dist), key=lambda path: path.suffix)
        (again,) = build(sdist, Path(folder) / "again", "--wheel")
        if contents(again) != contents(wheel):
            sys.exit(f"the sdist builds another wheel: {sorted(contents(again) ^ contents(wheel))}")
    for path in (sdist, wheel):
        require_package(path)
    print(run(sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)).strip())
    print(run(str(Path(sys.executable).with_name("check-wheel-contents")), str(wheel)).strip())
    require_works_alone(wheel)
    print(f"clcomm {version()} works in an empty environment: --version, --help, two ranks")
    print(f"for deploy/conda-recipe.yaml: sha256 of {sdist.name}: {hashlib.sha256(sdist.read_bytes()).hexdigest()}")
    if state != "dated":
        print(f"before it is released: CHANGELOG.md says {state!r} where the date has to be")


if __name__ == "__main__":
    main(*sys.argv[1:])
