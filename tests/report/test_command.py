"""`clcomm report`: every form to a file or the terminal, and what it refuses or leaves out."""

from __future__ import annotations

import pytest

from clcomm.base.errors import ArgumentError, DataError
from clcomm.tools import cli
from tests.report.runs import apart, document, written


def test_the_command_writes_every_form(tmp_path, capsys):
    names = written(tmp_path, apart(document(2)))
    for ending, begin in {
        "md": b"# convnet",
        "json": b"{",
        "csv": b"table,",
        "html": b"<!DOCTYPE",
        "txt": b"convnet",
    }.items():
        out = tmp_path / f"report.{ending}"
        assert cli.main(["report", *names, "-o", str(out)]) == 0
        assert out.read_bytes().startswith(begin)
    assert cli.main(["report", *names]) == 0
    assert capsys.readouterr().out == (tmp_path / "report.txt").read_text()
    assert cli.main(["report", *names, "--format", "markdown"]) == 0
    assert capsys.readouterr().out == (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("60", 60), ("10", 40), ("0", 120), ("wide", 120)])
def test_columns_says_how_wide_a_line_may_be(tmp_path, capsys, monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    (name,) = written(tmp_path, [document(2)])
    assert cli.main(["report", name]) == 0
    shown = capsys.readouterr().out
    assert width - 20 < max(map(len, shown.splitlines())) <= width
    assert cli.main(["report", name, "-o", str(tmp_path / "report.txt")]) == 0
    assert (tmp_path / "report.txt").read_text() == shown


def test_the_command_names_what_it_leaves_out(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("{")
    assert cli.main(["report", str(tmp_path / "bad.json"), *written(tmp_path, [document(2)])]) == 1
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith(f"clcomm: left out {tmp_path}/bad.json: expected JSON") and "convnet" in shown.out
    with pytest.raises(DataError, match=r"\A[^\n]*bad\.json: expected JSON[^\n]*\Z"):
        cli.main(["report", str(tmp_path / "bad.json")])


def test_an_unknown_ending_is_refused_and_markdown_has_a_short_name(tmp_path, capsys):
    (name,) = written(tmp_path, [document(2)])
    out = tmp_path / "report.pdf"
    with pytest.raises(ArgumentError, match=r"\A-o: expected a name that ends in one of \.md, .*report\.pdf.*\Z"):
        cli.main(["report", name, "-o", str(out)])
    assert not out.exists()
    assert cli.main(["report", name, "--format", "json", "-o", str(out)]) == 0 and out.read_text().startswith("{")
    assert cli.main(["report", name, "--format", "md"]) == 0
    assert capsys.readouterr().out.startswith("# convnet")


def test_a_picture(tmp_path):
    (name,) = written(tmp_path, [document(2)])
    with pytest.raises(ArgumentError, match=r"--format svg: needs -o"):
        cli.main(["report", name, "--format", "svg"])
    assert cli.main(["report", name, "-o", str(tmp_path / "charts.svg")]) == 0
    assert (tmp_path / "charts.svg").read_text().startswith("<svg ")
    with pytest.raises(ArgumentError, match=r"-o: expected a file to write"):
        cli.main(["report", name, "-o", str(tmp_path / "charts.svg" / "charts.svg")])
