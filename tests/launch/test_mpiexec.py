"""Which launcher `clcomm run` finds, and the options that it gives it."""

from __future__ import annotations

import os
import sys
from itertools import pairwise, permutations, product
from pathlib import Path

import pytest

from clcomm.base.errors import ArgumentError, LaunchError
from clcomm.jobs.launch import mpiexec
from clcomm.jobs.launch.mpiexec import INTEL, MPICH, OPEN_MPI, Mpiexec, find_mpiexec, require_hostfile
from tests.helpers import one_line

VERSIONS = {
    MPICH: "HYDRA build details:\n    Version:    4.3.2",
    OPEN_MPI: "mpiexec (Open MPI) 5.0.8",
    INTEL: "Intel(R) MPI Library for Linux* OS, Version 2021.16",
    None: "somebody's own launcher 1.0",
}


def launcher_at(folder: Path, kind: str | None, name: str = "mpiexec") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{VERSIONS[kind]}\nEND\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def place(tmp_path: Path, monkeypatch):
    """Return a function that sets the kind of MPI that is loaded, that beside Python and those on PATH."""

    def put(loaded: str, beside: str | bool | None, on_path: tuple[str | None, ...]) -> list[str]:
        monkeypatch.setattr(mpiexec, "_loaded_kind", lambda: loaded)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python"))
        made = [] if beside is False else [launcher_at(tmp_path / "own", beside)]  # type: ignore[arg-type]
        folders = [tmp_path / f"path{number}" for number in range(len(on_path))]
        names = [name for name, _ in zip(("mpiexec", "mpirun", "mpiexec.hydra"), on_path, strict=False)]
        made += [launcher_at(*each) for each in zip(folders, on_path, names, strict=True)]
        monkeypatch.setenv("PATH", os.pathsep.join(map(str, [*folders, "/usr/bin", "/bin"])))
        return made

    return put


@pytest.mark.parametrize("loaded", [MPICH, OPEN_MPI, INTEL])
@pytest.mark.parametrize("beside", [False, None, MPICH, OPEN_MPI, INTEL])
@pytest.mark.parametrize("on_path", list(permutations([MPICH, OPEN_MPI, INTEL], 2)))
def test_the_launcher_of_the_loaded_mpi_is_found_that_beside_python_first(place, loaded, beside, on_path):
    made = place(loaded, beside, on_path)
    kinds = [*([] if beside is False else [beside]), *on_path]
    if loaded in kinds:
        assert find_mpiexec() == Mpiexec(made[kinds.index(loaded)], loaded)
        return
    with pytest.raises(LaunchError) as caught:
        find_mpiexec()
    line = one_line(caught)
    assert f"expected one of {loaded}" in line
    assert all(path in line for path in made)


@pytest.mark.parametrize("kind", [MPICH, OPEN_MPI, INTEL])
@pytest.mark.parametrize(("hosts", "hostfile"), [("", ""), ("a,b:2", ""), ("", "hosts.txt")])
@pytest.mark.parametrize("ranks", [1, 64])
def test_each_mpi_gets_its_own_options(kind, hosts, hostfile, ranks, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("CLCOMM_", "OMP_", "PYTHON"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CLCOMM_CHECKS", "on")
    command = Mpiexec("/opt/mpiexec", kind).command(ranks, hosts, hostfile)
    assert (command[0], command[-2:]) == ("/opt/mpiexec", ["-n", str(ranks)])
    options = command[1:-2]
    where = {"hosts": ["--host", "a,b:2"], "file": ["--hostfile", "hosts.txt"]}
    if kind != OPEN_MPI:
        where = {"hosts": ["-hosts", "a,b:2"], "file": ["-f", "hosts.txt"]}
    expected = where["hosts"] if hosts else where["file"] if hostfile else []
    if kind == OPEN_MPI:
        assert options[:2] == ["--bind-to", "none"]
        assert options[2:] == (["-x", "CLCOMM_CHECKS", *expected] if expected else ["--oversubscribe"])
    else:
        assert options == expected


@pytest.mark.parametrize("kind", [MPICH, OPEN_MPI, INTEL])
@pytest.mark.parametrize("hosts", ["", "a,b"])
def test_variables_reach_all_hosts(kind, hosts, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("CLCOMM_", "OMP_", "PYTHON"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sent = ["DATA", "EMPTY", "OMP_NUM_THREADS"]
    command = Mpiexec("/opt/mpiexec", kind).command(2, hosts, "", variables=sent)
    if kind != OPEN_MPI:  # Hydra passes all by itself
        assert not any(word.startswith("-genv") for word in command)
        return
    named = [word for before, word in pairwise(command) if before == "-x"]
    assert named == sorted(sent)  # once each


BOUND = {
    (MPICH, ""): [], (MPICH, "none"): ["-bind-to", "none"], (MPICH, "core"): ["-bind-to", "core"],
    (MPICH, "numa"): ["-bind-to", "numa"],
    (OPEN_MPI, ""): ["--bind-to", "none", "--oversubscribe"],
    (OPEN_MPI, "none"): ["--bind-to", "none", "--oversubscribe"],
    (OPEN_MPI, "core"): ["--bind-to", "core:overload-allowed", "--oversubscribe"],
    (OPEN_MPI, "numa"): ["--bind-to", "numa:overload-allowed", "--oversubscribe"],
    (INTEL, ""): [], (INTEL, "none"): ["-genv", "I_MPI_PIN", "0"],
    (INTEL, "core"): ["-genv", "I_MPI_PIN_DOMAIN", "core"], (INTEL, "numa"): ["-genv", "I_MPI_PIN_DOMAIN", "numa"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "binding"), list(BOUND))
def test_ranks_are_bound_as_each_mpi_does(kind, binding):
    command = Mpiexec("/opt/mpiexec", kind).command(3, "", "", binding=binding)
    assert command == ["/opt/mpiexec", *BOUND[kind, binding], "-n", "3"]


@pytest.mark.parametrize(("kind", "uid", "is_set"), list(product([MPICH, OPEN_MPI, INTEL], [0, 1000], [False, True])))
def test_root_is_allowed_where_open_mpi_asks(kind, uid, is_set, monkeypatch):
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    for name in names:
        monkeypatch.delenv(name, raising=False)
        if is_set:
            monkeypatch.setenv(name, "0")
    wanted = Mpiexec("/opt/mpiexec", kind).environment()
    assert set(wanted) == (set(names) if kind == OPEN_MPI and uid == 0 and not is_set else set())


def test_the_loaded_library_is_one_that_has_a_launcher():
    assert mpiexec._loaded_kind() in VERSIONS


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("raise RuntimeError('cannot load MPI library')", "found none (RuntimeError: cannot load MPI library)"),
        ("print('Fujitsu MPI')", "got Fujitsu MPI, whose launcher clcomm run does not know"),
        ("pass", "found none (no answer)"),
    ],
)
def test_a_library_without_a_known_launcher_is_one_line(answer, said, monkeypatch):
    monkeypatch.setattr(mpiexec, "_ASK", answer)
    with pytest.raises(LaunchError) as caught:
        find_mpiexec()
    assert said in one_line(caught)


@pytest.mark.parametrize("kind", ["missing", "a folder", "a file"])
def test_a_hostfile_is_a_file(tmp_path, kind):
    path = tmp_path / "hosts"
    if kind == "a folder":
        path.mkdir()
    if kind == "a file":
        path.write_text("here\n")
        require_hostfile(str(path))
        return
    with pytest.raises(ArgumentError) as caught:
        require_hostfile(str(path))
    assert repr(str(path)) in one_line(caught)
