"""Fits kept for a host: read back as they were, refused when anything about the file is off."""

from __future__ import annotations

import json

import pytest

from clcomm.base.errors import ArgumentError, DataError, OutputError
from clcomm.base.storage.files import write_whole
from clcomm.base.storage.private import cache_directory
from clcomm.comm.costs import costfile
from clcomm.comm.costs.model import Cost, Fit, MeasuredFit
from tests.helpers import one_line

FITS = [
    MeasuredFit("shared", 4, 1, Fit(Cost(1.25e-5, 3e-10), 0.05, 0.21, ((1024, 1.3e-5), (1 << 20, 3.3e-4))), "device"),
    MeasuredFit("mpi", 4, 2, Fit(Cost(0.0, 2e-9), 0.1, 0.2, ((1024, 2e-6), (2048, 4e-6)))),
]


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("CLCOMM_CACHE_DIR", str(tmp_path))
    return costfile.path_of_host()


def test_what_is_stored_is_loaded(path):
    assert costfile.load() is None
    assert costfile.store(FITS) == path
    assert costfile.load() == FITS
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing temporary is left


def test_each_host_has_its_file(path):
    assert costfile.path_of_host("node-17.cluster").name == "node-17.cluster.json"
    assert costfile.path_of_host("../../etc/passwd").parent == path.parent


def changed(**fields):
    def change(table):
        table["fits"][0].update(fields)

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda table: table.update(format=1), "expected format 2"),
        (lambda table: table.update(format=True), "expected format 2"),
        (lambda table: table.update(more=1), "expected format, operation and fits"),
        (lambda table: table.pop("operation"), "expected format, operation and fits"),
        (lambda table: table.update(operation="broadcast"), "expected a list of fits of all_reduce"),
        (lambda table: table.update(fits={}), "expected a list of fits of all_reduce"),
        (lambda table: table["fits"][0].pop("alpha_s"), "expected fits with alpha_s, "),
        (changed(transport="gloo"), "expected a transport of shared, mpi, hierarchical"),
        (changed(transport=["mpi"]), "expected a transport of shared, mpi, hierarchical"),
        (changed(sums="abacus"), "expected sums device or numpy"),
        (changed(ranks=1), "ranks: expected a whole number from 2 up"),
        (changed(ranks=4.0), "ranks: expected a whole number from 2 up"),
        (changed(hosts=5), "expected at most 4 hosts, got 5"),
        (changed(alpha_s=-1e-6), "alpha_s: expected finite numbers from 0 up"),
        (changed(alpha_s="1e-6"), "alpha_s: expected finite numbers from 0 up"),
        (changed(beta_s_per_byte=True), "beta_s_per_byte: expected finite numbers from 0 up"),
        (changed(max_error=float("nan")), "expected finite numbers, got NaN"),
        (changed(points=[[1024]]), "expected points of bytes and seconds"),
        (changed(points=[[1.5, 1.0]]), "expected points of whole bytes"),
    ],
)
def test_a_file_that_says_anything_else_is_refused(path, change, problem):
    costfile.store(FITS)
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    with pytest.raises(DataError) as caught:
        costfile.load()
    message = one_line(caught)
    assert message.startswith(f"{path}: {problem}")
    assert message.endswith("; `clcomm tune` writes it again")


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null", b'{"format": 1e999}'])
def test_damage_is_refused(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        costfile.load()
    one_line(caught)


def test_a_huge_file_is_not_read(path):
    path.parent.mkdir()
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(DataError, match="longer than 1048576 bytes"):
        costfile.load()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    costfile.store(FITS)

    def refuse(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OutputError) as caught:
        costfile.store(FITS[:1])
    assert one_line(caught) == f"CLCOMM_CACHE_DIR: expected a file to write, got '{path}': No space left on device"
    assert costfile.load() == FITS
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CLCOMM_CACHE_DIR", raising=False)
    assert cache_directory() == tmp_path / "clcomm"
    monkeypatch.setenv("CLCOMM_CACHE_DIR", "/elsewhere")
    assert str(cache_directory()) == "/elsewhere"


def test_a_directory_in_the_way_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"^--json: expected a file to write, got "):
        write_whole(tmp_path, "text", "--json")
