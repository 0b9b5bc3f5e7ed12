"""`clcomm bench`: sizes, the check against the ranks' formula, the columns' arithmetic, files, printing."""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from clcomm import Communicator, bench
from clcomm.collective_cases import CASES, PERIOD, expected_reduction, rank_values, wrong_elements
from clcomm.engine import Device
from clcomm.engine.fold import Fold
from clcomm.errors import ArgumentError, DeviceError
from clcomm.measure import Lane, Row, Schedule, measure, sizes_between, time_calls
from clcomm.sums import agreed_fold
from tests.helpers import cpu_device, one_line

SHORT = Schedule(calls=1, windows=2, warmup=1)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(["--iterations", "2", "--windows", "2", "--warmup", "0", *words])


# --- sizes and numbers ---


def test_sizes_are_multiples_by_the_factor():
    assert sizes_between(256, 4096, 4) == [256, 1024, 4096]
    assert sizes_between(100, 400, 1.5) == [100, 150, 225, 337]
    assert sizes_between(7, 7, 2) == [7]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((512, 256, 2), "--max: expected at least --min's 512 bytes, got 256"),
        ((1, 2, 1.0), "--factor: expected a number above 1, got 1"),
        ((1, 2, float("nan")), "--factor: expected a number above 1, got nan"),
    ],
)
def test_sizes_that_make_no_range_are_refused(arguments, problem):
    with pytest.raises(ArgumentError) as caught:
        sizes_between(*arguments)
    assert one_line(caught) == problem


def test_columns_follow_from_the_seconds():
    lane = Lane("solo")
    case = CASES["all_reduce"](lane.comm, 4000)
    seconds = np.array([3e-6, 1e-6, 2e-6, 9e-6])
    case.comm.size = 4  # as if there were four
    row = Row.of(case, lane, seconds, 5)
    assert (row.bytes, row.count, row.dtype, row.op, row.wrong) == (4000, 1000, "float32", "sum", 5)
    assert (row.min_us, row.p50_us, row.p99_us) == pytest.approx((1, 2.5, 9))
    assert (row.algbw_gb_s, row.busbw_gb_s) == pytest.approx((1.6, 2.4))


def test_of_each_call_the_slowest_rank_counts_and_cases_take_turns():
    order = []

    class Timed:
        def __init__(self, name):
            self.name = name

        def once(self):
            order.append(self.name)

    class Control:
        def barrier(self):
            order.append("|")

        def all_reduce(self, seconds, op):
            assert op == "max"
            return seconds + 1  # as if another rank had been a second slower

    seconds = time_calls([Timed("a"), Timed("b")], Control(), Schedule(calls=2, windows=2, warmup=1))
    assert "".join(order) == "ab" + "a|a|ab|b|b" * 2
    assert seconds.shape == (2, 4)
    assert ((seconds >= 1) & (seconds < 2)).all()


# --- what is wrong ---


@given(st.sets(st.integers(0, 999), max_size=30), st.integers(0, 500), st.integers(0, 1000))
def test_wrong_elements_are_counted(places, first, size):
    period = rank_values(3, np.dtype(np.int64))
    array = np.array([period[(first + index) % PERIOD] for index in range(size)], np.int64)
    inside = [place for place in places if place < size]
    array[inside] += 1
    assert wrong_elements(array, period, first) == len(inside)


def test_nan_is_wrong():
    period = rank_values(0, np.dtype(np.float32))
    array = period.copy()
    array[5] = np.nan
    assert wrong_elements(array, period) == 1


@pytest.mark.parametrize("dtype", bench.DTYPES)
@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_expected_values_are_those_of_all_ranks(op, dtype):
    ranks = [((7 * np.arange(PERIOD) + 31 * rank) % 97).astype(dtype) for rank in range(5)]
    reduce = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op].reduce
    np.testing.assert_array_equal(expected_reduction(5, op, np.dtype(dtype)), reduce(ranks, axis=0, dtype=dtype))


def test_a_mean_is_the_sum_divided():
    np.testing.assert_array_equal(
        expected_reduction(3, "mean", np.dtype(np.float32)),
        expected_reduction(3, "sum", np.dtype(np.float32)) / np.float32(3),
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("operation", CASES)
def test_nothing_is_wrong_where_nothing_is_broken(operation, dtype, comm):
    for nbytes in (1, 1000, 100_000):
        case = CASES[operation](comm, nbytes, dtype)
        case.once()
        assert case.check() == 0
        assert case.count % (comm.size if case.parted else 1) == 0
        assert case.nbytes == case.count * np.dtype(dtype).itemsize >= min(nbytes, 1)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("transport", ["shared", "mpi", "solo", "auto"])
@pytest.mark.parametrize("op", ["mean", "min"])
def test_every_transport_measures_every_operation(transport, op):
    lane, control = Lane(transport), Communicator(transport="mpi")
    for operation in CASES:
        (row,) = measure([lane], control, operation, 50_000, "float64", op, SHORT)
        assert row.wrong == 0
        assert 0 < row.min_us <= row.p50_us <= row.p99_us
        assert row.busbw_gb_s <= row.algbw_gb_s * 2
        assert row.transport == transport
        assert row.moved_by in ("shared", "mpi", "solo")
    lane.comm.finalize()
    control.finalize()


class Counted:
    """A device's sums, counted as they are made."""

    def __init__(self):
        self.made, self._fold = 0, Fold(cpu_device("cpu"))

    def __call__(self, rows, out, divisor):
        prepared = self._fold(rows, out, divisor)

        def run():
            self.made += 1
            prepared()

        return None if prepared is None else run


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("nbytes", [256, 500_000])
@pytest.mark.parametrize(
    ("transport", "operation", "dtype", "op", "sums"),
    [
        ("shared", "all_reduce", "float32", "sum", "device"),
        ("auto", "all_reduce_init", "float32", "mean", "device"),
        ("shared", "all_reduce", "float32", "min", "numpy"),
        ("shared", "all_reduce", "float64", "sum", "numpy"),
        ("shared", "reduce_scatter", "float32", "sum", "numpy"),
        ("mpi", "all_reduce", "float32", "sum", "numpy"),
        ("shared", "broadcast", "float32", "sum", "none"),
    ],
)
def test_a_row_says_what_made_its_sums(transport, operation, dtype, op, sums, nbytes):
    fold = Counted()
    lane, control = Lane(transport, fold=fold), Communicator(transport="mpi")
    (row,) = measure([lane], control, operation, nbytes, dtype, op, SHORT)
    assert (row.sums, row.wrong) == (sums, 0)
    assert (fold.made > 0) == (sums == "device")
    lane.comm.finalize()
    control.finalize()


@pytest.mark.parametrize("asked", [None, "device", "numpy"])
def test_sums_are_the_devices_where_training_has_them(comm, asked, monkeypatch):
    chosen = cpu_device("cpu")
    monkeypatch.setattr(Device, "select", lambda **place: chosen)
    monkeypatch.setattr(chosen, "runs_in_caller", True)
    assert isinstance(agreed_fold(comm, asked), Fold) == (asked != "numpy")


def no_platform(**place):
    raise DeviceError("no OpenCL platform found")


def no_pyopencl(**place):
    raise ImportError("No module named 'pyopencl'")


@pytest.mark.parametrize("why", ["GPU", no_platform, no_pyopencl])
def test_without_such_a_device_on_every_rank_sums_are_numpys(comm, why, monkeypatch):
    chosen, select = cpu_device("cpu"), (lambda **place: chosen)
    monkeypatch.setattr(Device, "select", select if why == "GPU" or comm.rank < comm.size - 1 else why)
    monkeypatch.setattr(chosen, "runs_in_caller", why != "GPU")
    assert agreed_fold(comm, None) is None
    with pytest.raises(ArgumentError) as caught:
        agreed_fold(comm, "device")
    text = one_line(caught)
    assert text.startswith("--sums: expected every rank's device to compute in the calling thread, but on rank ")
    assert text.endswith("; use --sums numpy")


class Broken:
    """Stands in for a Communicator whose last rank gets some elements of each result wrong."""

    def __init__(self, comm, spoil):
        self._comm, self._spoil = comm, spoil

    def __getattr__(self, name):
        attribute = getattr(self._comm, name)
        if name not in ("all_reduce", "broadcast", "all_gather", "reduce_scatter"):
            return attribute

        def call(*arguments, **keywords):
            result = attribute(*arguments, **keywords)
            if self._comm.rank == self._comm.size - 1:
                self._spoil(result.reshape(-1))
            return result

        return call


def one_off(values):
    values[3] += 1


def shifted(values):
    values[1:] = values[:-1].copy()


@pytest.fixture(params=["alone", pytest.param("ranks", marks=pytest.mark.mpi(min_size=2))])
def lane():
    made = Lane("mpi")
    yield made
    made.comm = None  # not closed: after a failure other ranks may be elsewhere


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "all_gather", "reduce_scatter"])
def test_a_broken_transport_is_caught(operation, lane):
    control, real = Communicator(transport="mpi"), lane.comm
    lane.comm = Broken(real, one_off)
    (row,) = measure([lane], control, operation, 4096, "float32", "sum", SHORT)
    assert row.wrong == 1
    lane.comm = Broken(real, shifted)
    (row,) = measure([lane], control, operation, 4096, "float32", "sum", SHORT)
    assert row.wrong >= 4096 // 4 // real.size // 2


def test_a_transport_that_does_nothing_is_caught(auto):
    case = CASES["all_reduce"](auto, 4096)
    case.once = lambda: None
    assert case.check() > 1000


# --- the command ---


@pytest.mark.mpi(min_size=1)
def test_the_command_prints_on_rank_0_and_writes_json(capfd, tmp_path):
    file = tmp_path / "rows.json"
    words = ["--operation", "all_reduce", "broadcast", "--transport", "shared", "mpi", "--max", "1KiB"]
    with Communicator(transport="mpi") as comm:
        assert bench.run(options(*words, "--sums", "numpy", "--json", str(file))) == 0
        lines = capfd.readouterr().out.splitlines()
        if comm.rank:
            assert lines == []
            assert not file.exists()
            return
        assert lines[0].split()[:2] == ["operation", "transport"]
        assert len(lines) == 1 + 2 * 2 * 2
        assert all(line.endswith("x") for line in lines[1:])
        document = json.loads(file.read_text())
    assert document.keys() == {
        "schema", "clcomm", "world_size", "ranks_per_host", "cores_per_rank", "iterations", "windows", "warmup", "rows",
    }  # fmt: skip
    assert (document["schema"], document["world_size"], document["iterations"]) == (1, comm.size, 2)
    assert len(document["rows"]) == 8
    for row in document["rows"]:
        assert row.keys() == {
            "operation", "transport", "moved_by", "bytes", "count", "dtype", "op", "sums", "min_us", "p50_us",
            "p99_us", "algbw_gb_s", "busbw_gb_s", "wrong",
        }  # fmt: skip
        assert row["op"] == ("sum" if row["operation"] == "all_reduce" else "none")
        assert row["sums"] == ("numpy" if row["operation"] == "all_reduce" else "none")
        assert row["algbw_gb_s"] == pytest.approx(row["bytes"] / row["p50_us"] / 1e3)


def test_alone_it_needs_no_mpiexec(capsys):
    assert bench.run(options("--transport", "solo", "--max", "4KiB")) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.endswith("wrong")
    assert [row.split()[2] for row in rows] == ["256", "1024", "4096"]
    assert {row.split()[-1] for row in rows} == {"0"}


def test_wrong_elements_fail_the_command(monkeypatch, capsys):
    monkeypatch.setattr(CASES["all_reduce"], "check", lambda self: 7)
    assert bench.run(options("--transport", "solo", "--max", "256")) == 1
    assert "7 elements are wrong" in capsys.readouterr().out


def test_sizes_below_an_element_come_once(capsys):
    assert bench.run(options("--min", "1", "--max", "8", "--factor", "2", "--dtype", "float64")) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:]] == ["8"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--min", "ten"], "--min: expected a positive number of bytes"),
        (["--iterations", "1", "--windows", "2"], "--iterations: expected at least one in each of 2 windows, got 1"),
        (["--windows", "0"], "--windows: expected a number from 1 up, got 0"),
        (["--warmup", "-1"], "--warmup: expected a number from 0 up, got -1"),
        (["--json", "/no/such/place/rows.json"], "--json: expected a file in a directory that exists, got "),
        (["--dtype", "int32", "--op", "mean"], "--op: 'mean' needs a floating dtype, got int32; use 'sum'"),
    ],
)
def test_bad_options_are_refused_in_a_line(words, problem):
    with pytest.raises(ArgumentError) as caught:
        bench.run(options("--transport", "solo", *words))
    assert one_line(caught).startswith(problem)


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    with pytest.raises(ArgumentError) as caught:
        bench.run(options("--plot", "rows.png"))
    assert one_line(caught) == "--plot: needs matplotlib, which is not installed; pip install 'clcomm[plot]'"
    assert capsys.readouterr().out == ""


def test_a_plot_is_a_png_and_needs_no_display(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'clcomm[plot]'")
    file = tmp_path / "rows.png"
    assert bench.run(options("--transport", "solo", "--max", "64KiB", "--plot", str(file))) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_without_plot_matplotlib_is_left_alone(monkeypatch, capsys):
    real = builtins.__import__

    def guarded(name, *rest, **keywords):
        assert not name.startswith("matplotlib")
        return real(name, *rest, **keywords)

    monkeypatch.setattr(builtins, "__import__", guarded)
    assert bench.run(options("--transport", "solo", "--max", "256")) == 0


def test_lines_are_never_wrapped(capsys):
    row = Row(
        "reduce_scatter", "auto", "hierarchical", 1 << 33, 1 << 31, "float32", "mean", "numpy", 1e7, 1e7, 1e7, 1, 1, 0
    )
    bench.Printer(Console(soft_wrap=True, width=40), True).show([row, row])
    assert len(capsys.readouterr().out.splitlines()) == 3
