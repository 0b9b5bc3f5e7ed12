"""Ranks that were started differently: every option, argument and version, and the same line on every rank."""

from __future__ import annotations

import logging
import random
import re

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import MismatchError
from clcomm.comm.collectives import same_start
from clcomm.comm.collectives.same_start import OF_EACH_RANK, Fact, declare, difference
from clcomm.comm.watch.job import this_job
from tests.helpers import one_line
from tests.option_values import Option, options

#: Programs whose ranks make a Communicator.
COLLECTIVE = ("python -m examples.mnist", "python -m examples.compare_bucketing", "clcomm bench", "clcomm tune")


@pytest.fixture(autouse=True)
def nothing_declared(monkeypatch):
    monkeypatch.setattr(this_job(), "declared", ())
    monkeypatch.setattr(this_job(), "warned", set())


def collective_options() -> list[Option]:
    found = [option for option in options() if option.program in COLLECTIVE]
    assert {option.program for option in found} == set(COLLECTIVE)
    return found


def ranks_that_differ(size: int, draw: random.Random) -> list[int]:
    """Return some ranks, neither none nor all."""
    return sorted(draw.sample(range(size), draw.randint(1, size - 1)))


def words(ranks: list[int]) -> str:
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def refused(comm: Communicator, **arguments) -> str:
    """Create a Communicator that no rank gets, and return the line, which has to be the same on all."""
    with pytest.raises(MismatchError) as caught:
        Communicator(**arguments)
    lines = comm.all_gather_object(one_line(caught))
    assert len(set(lines)) == 1
    return lines[0]


@pytest.mark.mpi(min_size=2)
def test_every_option_of_every_program_is_compared():
    comm, draw, tried = Communicator(transport="mpi"), random.Random(12), 0
    for option in collective_options():
        odd = ranks_that_differ(comm.size, draw)
        usual, other = (option.parser.parse_args(line) for line in option.two_values())
        declare(option.program, other if comm.rank in odd else usual)
        if option.action.dest in OF_EACH_RANK:
            Communicator(transport="mpi").finalize()
            continue
        line = refused(comm, transport="mpi")
        assert line.startswith(f"{option.flag}: expected the same on every rank, got "), line
        assert line.endswith("; start all ranks with the same options") and "too" not in line
        sides = [[rank for rank in range(comm.size) if (rank in odd) == is_odd] for is_odd in (False, True)]
        for ranks in sides:
            assert f" on {words(ranks)}" in line, line
        tried += 1
    assert tried > 100
    assert OF_EACH_RANK == ("device",)  # a longer list is a decision


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "usual", "other"), [("bucket_size", 1000, "auto"), ("use_bucketing", True, False)]
    + [("transport", "auto", other) for other in ("mpi", "shared")],
)  # fmt: skip
def test_a_communicators_arguments_are_compared(name, usual, other):
    with Communicator() as comm:
        line = refused(comm, **{name: other if comm.rank == comm.size - 1 else usual})
        assert line.startswith(f"{name}: expected the same on every rank, got ")
        assert line.endswith(
            f" on {words([comm.size - 1])}; create the Communicator with the same arguments on all ranks"
        )
        Communicator().finalize()  # the ranks still understand each other


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("where", "value", "name"),
    [
        ("clcomm.comm.collectives.same_start.__version__", "99.9", "clcomm"), ("numpy.__version__", "99.9.0", "NumPy"),
        ("mpi4py.__version__", "99.0", "mpi4py"), ("sys.byteorder", "middle", "byte order"),
    ],
)  # fmt: skip
def test_versions_that_do_not_go_together_are_refused(monkeypatch, where, value, name):
    with Communicator() as comm:
        if comm.rank == 0:
            monkeypatch.setattr(where, value)
        line = refused(comm)
        assert line.startswith(f"{name}: expected the same on every rank, got ")
        assert line.endswith("; install the same versions for all ranks")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["NumPy", "PyOpenCL", "CLCOMM_CHECKS", "CLCOMM_TIMEOUT_S", "timeout_s"])
def test_what_is_only_suspicious_is_said_once(monkeypatch, caplog, name):
    with Communicator() as comm:
        is_odd, arguments = comm.rank == comm.size - 1, {}
        if name == "NumPy" and is_odd:
            monkeypatch.setattr(np, "__version__", np.__version__ + ".post1")
        elif name == "PyOpenCL" and is_odd:
            monkeypatch.setattr(same_start, "_pyopencl_version", lambda: "1999.1")
        elif name == "timeout_s":
            arguments = {"timeout_s": 200.0 if is_odd else 100.0}
        elif is_odd:
            monkeypatch.setenv(name, {"CLCOMM_CHECKS": "off"}.get(name, "123"))
        with caplog.at_level(logging.WARNING, "clcomm"):
            for _ in range(2):
                Communicator(**arguments).finalize()
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == (comm.rank == 0)
        for line in said:
            assert line.startswith(f"{name}: expected the same on every rank, got ")


def test_a_difference_names_its_values_and_ranks():
    """Random tables of facts, against a search that knows nothing of dictionaries."""
    for seed in range(300):
        draw = random.Random(seed)
        names = [f"--{letter}" for letter in "abcdef"]
        table = [[Fact(name, str(draw.choice([1, 1, 1, 2, 3])), "do it") for name in names] for _ in range(5)]
        columns = [[rank[at].value for rank in table] for at in range(len(names))]
        differing = [at for at, column in enumerate(columns) if any(value != column[0] for value in column)]
        if not differing:
            continue
        line, column = difference(table), columns[differing[0]]
        sides = re.findall(r"(\d) on (rank \d|ranks [\d, ]*\d and \d)(?=,|;)", line)
        expected = [(value, words([r for r in range(5) if column[r] == value])) for value in dict.fromkeys(column)]
        assert sides == expected, line
        assert line.startswith(names[differing[0]] + ":")
        assert [name for name in names if f"{name}:" not in line and name in line] == [
            names[at] for at in differing[1:5]
        ]


def test_long_and_many_values_stay_readable():
    path = "/data/" + "a" * 5000
    values = [f"{path}/{rank}.csv" for rank in range(100)]
    line = difference([[Fact("--log-csv", value, "do it")] for value in values])
    assert len(line) < 400 and "/0.csv on rank 0" in line and "96 others" in line
    line = difference([[Fact("--lr", str(rank < 60), "do it")] for rank in range(100)])
    assert len(line) < 200 and "True on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 52 more, False on ranks 60," in line


def test_ranks_of_different_programs_are_named():
    mine, theirs = [Fact("program", "a", "start"), Fact("--x", "1", "do it")], [Fact("program", "b", "start")]
    assert difference([mine, theirs]) == "program: expected the same on every rank, got a on rank 0, b on rank 1; start"
