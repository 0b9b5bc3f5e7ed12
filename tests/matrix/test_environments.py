"""What the matrix is made of: each row once, everything that it names exists, and what is not at hand says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.launch import ROOT
from tests.matrix.environments import EXTRAS, LOW, PYTHONS, SYSTEM, TORCH, Environment, environments
from tests.matrix.run import ON_RANKS, PLAIN, WITH_TORCH, Place, page


def test_every_python_mpi_and_runtime_has_a_row_of_its_own() -> None:
    rows = list(environments())
    assert len({each.name for each in rows}) == len(rows)
    assert {each.python for each in rows} == set(PYTHONS)
    assert {each.mpi for each in rows} == {"MPICH", "Open MPI", *SYSTEM}
    assert {each.opencl for each in rows} == {"PoCL", "Debian's PoCL", "Intel"}
    assert {(each.mpi) for each in rows if each.versions == LOW} == {"MPICH", "Open MPI"}


def test_its_tests_and_extras_exist() -> None:
    assert all((ROOT / path).is_file() for path in (*PLAIN, *ON_RANKS, *WITH_TORCH))
    text = (ROOT / "pyproject.toml").read_text()
    for extras in EXTRAS.values():
        assert all(f"\n{extra} = [" in text for extra in extras.split(","))


def test_the_extra_torch_allows_what_the_matrix_has_and_all_others_have_one_version() -> None:
    """A range may bring PyPI's build with CUDA, which what make and CI install must not."""
    text = (ROOT / "pyproject.toml").read_text()
    low, high = re.search(r'^torch = \["torch>=([\d.]+),<([\d.]+)"\]', text, re.M).groups()
    in_order = [[*map(int, each.split("."))] for each in (low, *TORCH, high)]
    assert (
        in_order == sorted(in_order)
        and in_order[0] == in_order[1][:2]
        and {each.torch for each in environments()} == {"", *TORCH}
    )
    pins = re.findall(r'^([\w-]+) = \[.*"torch==([\d.]+)"', text, re.M)
    assert {name for name, _ in pins} == {"torch-suite", "trainers", "bench", "anchors"}
    assert {version for _, version in pins} == {TORCH[1]} and "clcomm[torch]" not in text
    for path in ("Makefile", ".ci/run", "CONTRIBUTING.md", "README.md"):
        assert not re.search(r"TEST_EXTRAS=\S*\btorch(?!-)", (ROOT / path).read_text()), path


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLCOMM_MATRIX_ROOT", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = {each.name: each.missing for each in environments()}
    assert all(each.startswith("no Python 3.") for each in missing.values())
    monkeypatch.undo()
    monkeypatch.setenv("CLCOMM_MATRIX_ROOT", str(tmp_path))
    for each in environments():
        if "Debian" in each.mpi + each.opencl:
            assert each.missing.endswith("is not installed") or each.missing.startswith("no Python"), each


def test_a_systems_mpi_gets_the_name_that_mpi4py_looks_for(tmp_path: Path) -> None:
    given = Environment(mpi="Debian's MPICH", launcher="/usr/bin/mpiexec.mpich", library="/usr/lib/libmpich.so.12")
    place = Place(given, tmp_path / "env")
    assert (tmp_path / f"{given.name}-mpi" / "libmpi.so.12").readlink() == Path("/usr/lib/libmpich.so.12")
    assert place.mpiexec == ["/usr/bin/mpiexec.mpich", "-n", "2"]


def test_the_page_has_a_row_for_each() -> None:
    text = page({each.name: f"row {each.name}" for each in environments()})
    assert all(f"\nrow {each.name}\n" in text for each in environments())
    assert page({}).count("| not run |") == len(list(environments()))
