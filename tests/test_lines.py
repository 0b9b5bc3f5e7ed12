"""The budgets of lines: every package has one, and too many lines fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import lines


def test_every_package_has_a_budget() -> None:
    packages = {f"clcomm/{path.parent.name}" for path in (lines.ROOT / "clcomm").glob("*/__init__.py")}
    assert packages <= lines.budgets().keys()


def test_lines_over_the_budget_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "package" / "kernels").mkdir(parents=True)
    (tmp_path / "package" / "one.py").write_text("a\nb\n")
    (tmp_path / "package" / "kernels" / "two.cl").write_text("c\n")
    monkeypatch.setattr(lines, "ROOT", tmp_path)
    monkeypatch.setattr(lines, "BUDGETS", tmp_path / "lines.txt")
    for most, code in ((3, 0), (2, 1)):
        (tmp_path / "lines.txt").write_text(f"package {most}\n")
        assert lines.main() == code
    assert capsys.readouterr().out.splitlines()[1].endswith("3 of       2  over its budget")
