"""Hosts as users name them, without those that are lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.jobs.launch.mpiexec import HostList

FILE = "# two\na:2   # the first\n\nb slots=3 max_slots=4\na\n"


@pytest.fixture
def hostfile(tmp_path) -> str:
    (tmp_path / "hosts").write_text(FILE)
    return str(tmp_path / "hosts")


def test_names_and_what_is_left_of_them(tmp_path, hostfile):
    listed = HostList("a:2,b,c:3", "")
    assert listed.names == ["a", "b", "c"]
    assert listed.options(["c", "a"], tmp_path) == ("a:2,c:3", "")
    listed = HostList("", hostfile)
    assert listed.names == ["a", "b"]
    assert listed.options(["a", "b"], tmp_path) == ("", hostfile)
    _, without = listed.options(["a"], tmp_path)
    assert without != hostfile and Path(without).read_text() == "a:2\na\n"
    _, other = listed.options(["b"], tmp_path)
    assert other != without and Path(other).read_text() == "b slots=3 max_slots=4\n"


@pytest.mark.parametrize(
    ("hosts", "ranks", "left", "dealt"),
    [
        ("a,b", 4, "ab", {"a": 2, "b": 2}),
        ("a:2,b:2", 3, "ab", {"a": 2, "b": 1}),
        ("a:2,b:2", 2, "ab", {"a": 2, "b": 0}),
        ("a:2,b:2", 5, "ab", {"a": 3, "b": 2}),
        ("a:2,b:2,a", 5, "ab", {"a": 3, "b": 2}),
        ("a:2,b:2", 2, "b", {"b": 2}),
        ("a,b", 4, "", {}),
    ],
)
def test_ranks_are_dealt_as_launchers_do(hosts, ranks, left, dealt):
    assert HostList(hosts, "").dealt(ranks, left) == dealt


@pytest.mark.parametrize(
    ("hosts", "ranks", "left", "room"),
    [("a:2,b:2", 4, "a", 2), ("a:2,b:2", 2, "b", 2), ("a,b", 4, "b", 2), ("a,b,c", 4, "ac", 3), ("a:2,b", 4, "", 0)],
)
def test_hosts_have_room_for_what_is_written_or_what_they_had(hosts, ranks, left, room):
    assert HostList(hosts, "").room(ranks, left) == room


def test_no_hosts_are_none_but_an_empty_file_is_an_error(tmp_path):
    assert HostList("", "").names == []
    (tmp_path / "none").write_text("# nobody\n")
    with pytest.raises(ArgumentError, match=r"^--hostfile: expected the names of hosts, got "):
        HostList("", str(tmp_path / "none"))
    with pytest.raises(ArgumentError, match=r"^--hosts: expected the names of hosts, got ',' without any$"):
        HostList(",", "")
