"""Lines of code: every package has a most, and too many fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import lines


def test_every_package_has_a_most() -> None:
    packages = {f"clcomm/{path.parent.name}" for path in (lines.ROOT / "clcomm").glob("*/__init__.py")}
    assert packages <= lines.budgets().keys()


@pytest.mark.parametrize(
    ("suffix", "text", "count"),
    [
        (".py", '"""Doc\n\nstring."""\n\nx = 1  # said\n# alone\ndef f():\n    """Doc."""\n    return "a"\n', 3),
        (".py", 'x = """text\n\nmore"""\n', 2),
        (".cl", "// a\nkernel void f() { /* one\n two */\n\n  int x; // said\n}\n", 3),
        (".css", "/* all\nof it */\n", 0),
    ],
)
def test_comments_docstrings_and_blank_lines_do_not_count(suffix: str, text: str, count: int) -> None:
    assert lines.code_lines(text, suffix) == count


def test_a_rise_fails_and_a_fall_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "package" / "kernels").mkdir(parents=True)
    (tmp_path / "package" / "one.py").write_text("a\nb\n# c\n")
    (tmp_path / "package" / "kernels" / "two.cl").write_text("c\n")
    monkeypatch.setattr(lines, "ROOT", tmp_path)
    monkeypatch.setattr(lines, "BUDGETS", tmp_path / "lines.txt")
    for most, code in ((3, 0), (2, 1)):
        (tmp_path / "lines.txt").write_text(f"package {most}\n")
        assert lines.main() == code
    assert capsys.readouterr().out.splitlines()[1].endswith("3 of       2  too many")
    for most, kept in ((9, 3), (2, 2)):
        (tmp_path / "lines.txt").write_text(f"package {most}\n")
        lines.main(lower=True)
        assert lines.budgets() == {"package": kept}
