"""`clcomm bench`: its options, what it prints and writes, and what it refuses."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest
from rich.console import Console

from clcomm import Communicator, __version__
from clcomm.base.errors import ArgumentError
from clcomm.insight.measure import bench
from clcomm.insight.measure.bench import average_busbw
from clcomm.insight.measure.collective_cases import CASES
from clcomm.insight.measure.timing import BenchRow
from tests.helpers import one_line


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(["--iterations", "2", "--windows", "2", "--warmup", "0", *words])


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
        assert lines[0].startswith(f"clcomm {__version__}, Python ") and "mpi4py" in lines[0]
        assert lines[1] == f"{comm.size} rank{'s' if comm.size > 1 else ''} on 1 host"
        headings = [number for number, line in enumerate(lines) if line.split()[:2] == ["operation", "transport"]]
        rows = [line for line in lines if line.split()[1] in ("shared", "mpi") and line.endswith("x")]
        assert headings[0] == 4 and len(rows) == 2 * 2 * 2  # a long time has the headings printed again
        document = json.loads(file.read_text())
    assert document.keys() == {
        "schema", "clcomm", "world_size", "ranks_per_host", "cores_per_rank", "iterations", "windows", "warmup",
        "average_busbw_gb_s", "fits", "rows",
    }  # fmt: skip
    assert [(each["operation"], each["transport"]) for each in document["fits"]] == [
        (operation, transport) for operation in ("all_reduce", "broadcast") for transport in ("shared", "mpi")
    ]
    assert all(each["alpha_s"] >= 0 <= each["beta_s_per_byte"] for each in document["fits"])
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
    *_, heading, first, second, third, average = capsys.readouterr().out.splitlines()
    rows = [first, second, third]
    assert heading.startswith("operation") and average == "average busbw of all_reduce: 0.000 GB/s through solo"
    assert heading.endswith("wrong")
    assert [row.split()[2] for row in rows] == ["256", "1024", "4096"]
    assert {row.split()[-1] for row in rows} == {"0"}


def test_wrong_elements_fail_the_command(monkeypatch, capsys):
    monkeypatch.setattr(CASES["all_reduce"], "check", lambda self: 7)
    assert bench.run(options("--transport", "solo", "--max", "256")) == 1
    assert "7 elements are wrong" in capsys.readouterr().out


def test_sizes_below_an_element_come_once(capsys):
    assert bench.run(options("--min", "1", "--max", "8", "--factor", "2", "--dtype", "float64")) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("all_reduce")]
    assert [row[2] for row in rows] == ["8"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--min", "ten"], "--min: expected a positive number of bytes"),
        (["--iterations", "1", "--windows", "2"], "--iterations: expected at least one in each of 2 windows, got 1"),
        (["--json", "/dev/null/rows.json"], "--json: expected a file to write, got '/dev/null/rows.json': Not a dir"),
        (["--json", "/proc/rows.json"], "--json: expected a file to write, got "),
        (["--json", ""], "--json: expected a file to write, got '': a directory"),
        (["--plot", "rows.png"], "--plot: expected a file whose name ends in .svg, got 'rows.png'"),
        (
            ["--min", "9999999GiB", "--max", "9999999GiB"],
            "--max: expected a value whose memory this host has, ",
        ),
        (["--dtype", "int32", "--op", "mean"], "--op: 'mean' needs a floating dtype, got int32; use 'sum'"),
    ],
)
def test_bad_options_are_refused_in_a_line(words, problem):
    with pytest.raises(ArgumentError) as caught:
        bench.run(options("--transport", "solo", *words))
    assert one_line(caught).startswith(problem)


def test_a_plot_is_a_file_of_svg(tmp_path):
    file = tmp_path / "rows.svg"
    assert bench.run(options("--transport", "solo", "--max", "64KiB", "--plot", str(file))) == 0
    assert file.read_text().startswith("<svg ")


def test_the_average_busbw_weighs_sizes_alike_and_transports_apart(capfd, tmp_path):
    file = tmp_path / "rows.json"
    assert bench.run(options("--transport", "solo", "--operation", "all_gather", "--json", str(file))) == 0
    document = json.loads(file.read_text())
    expected = sum(row["busbw_gb_s"] for row in document["rows"]) / len(document["rows"])
    assert document["average_busbw_gb_s"] == {"all_gather": {"solo": pytest.approx(expected)}}
    drawn = zip("xyxy", (1, 2, 3, 6), strict=True)
    rows = [BenchRow("a", name, name, 4, 1, "", "", "", 1, 1, 1, 1, busbw, 0) for name, busbw in drawn]
    assert average_busbw(rows) == {"x": 2, "y": 4}


def test_headings_come_again_where_a_number_needs_more_room(capsys):
    row = BenchRow("all_reduce", "auto", "auto", 8, 2, "float32", "sum", "numpy", 1.0, 1.0, 1.0, 1, 1, 0)
    printer = bench.Printer(Console(soft_wrap=True, width=140), False)
    for seconds in (1, 1, 123456789):
        printer.show([replace(row, p50_us=float(seconds))])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["operation", "all_reduce", "all_reduce", "operation", "all_reduce"]
    assert "123456789.0" in lines[-1].split()
    for heading, line in ((lines[0], lines[1]), (lines[3], lines[4])):
        assert len(heading) == len(line)
