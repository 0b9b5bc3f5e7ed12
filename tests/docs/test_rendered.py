"""The check of drawn pages finds what is wrong in pages made for it, where a Chromium is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from docs import rendered

WIDE = "<table><tr>" + "<td>wide</td>" * 40 + "</tr></table>"
NOTE = "<style>.says::before { content: 'Scrolls' } div { overflow-x: auto }</style>"


@pytest.fixture
def browser() -> str:
    found = rendered.installed()
    if found is None:
        pytest.skip(f"no Chromium is installed ({', '.join(rendered.BROWSERS)})")
    return found


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<p>Fine</p><table><tr><td>narrow</td></tr></table>", []),
        (f"{NOTE}<div class='says'>{WIDE}</div>", []),
        (f"{NOTE}<div>{WIDE}</div>", ["at 390 pixels: a table's last column is cut and nothing says that it scrolls"]),
        ("<div style='overflow: hidden'>" + WIDE + "</div>", ["at 390 pixels: a table's last column is cut:"]),
        ("<p style='color: #aaa'>faint</p>", ["light: a contrast of 2.32 to 1 (170,170,170 on 255,255,255): faint"]),
        (
            "<div style='background: #000'><p style='color: rgba(255, 255, 255, 0.3)'>faint</p></div>",
            ["light: a contrast of 2.46 to 1"],
        ),
        ("<img src='gone.png' alt='gone'>", ["a picture that is not there"]),
    ],
)
def test_what_is_wrong_is_found(body: str, expected: list[str], browser: str, tmp_path: Path) -> None:
    page = f"<!DOCTYPE html><html lang='en'><title>x</title><body><article>{body}</article></body></html>"
    (tmp_path / "page.html").write_text(page)
    found = rendered.problems(tmp_path, browser, ["page.html"], [])
    assert len(found) >= len(expected) and bool(found) == bool(expected)
    for each in expected:
        assert any(f"page.html: {each}" in line for line in found), found


def test_without_a_browser_a_line_says_that_nothing_was_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["rendered", "nowhere"])
    assert rendered.main() == 0
    assert "not looked at: no Chromium is installed" in capsys.readouterr().out
