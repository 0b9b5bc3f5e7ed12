"""Rich's console: on the job's terminal where that may be repainted, else plain lines."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from clcomm.base.console import output


@pytest.fixture
def pty() -> Iterator[SimpleNamespace]:
    """A terminal of 91 columns and 33 rows; `read` returns what was written to it."""
    master, slave = os.openpty()

    def resize(columns: int, rows: int) -> None:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    opened: list[Any] = []

    def open_terminal() -> Any:
        opened.append(os.fdopen(os.dup(slave), "w", encoding="utf-8"))
        return opened[-1]

    resize(91, 33)
    yield SimpleNamespace(open=open_terminal, resize=resize, read=lambda: os.read(master, 4096).decode())
    for stream in opened:
        stream.close()
    os.close(master)
    os.close(slave)


def terminal(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.setattr(output, "terminal_of_output", lambda: found)
    monkeypatch.setenv("COLUMNS", "77")


def plain(pid: int = 1) -> SimpleNamespace:
    return SimpleNamespace(may_repaint=lambda: False, pid=pid)


@pytest.mark.parametrize("found", [None, plain(), plain(os.getpid())], ids=["none", "launcher's", "own"])
def test_without_a_terminal_to_repaint_lines_are_plain(monkeypatch, capsys, found) -> None:
    terminal(monkeypatch, found)
    console = output.make_console()
    console.print("[bold]text[/bold] " + "word " * 40)
    shown = capsys.readouterr().out
    assert not console.is_terminal and console.width == 77
    assert shown == "text " + "word " * 40 + "\n"  # neither folded nor styled


def test_the_processs_own_terminal_is_richs_own_console(monkeypatch) -> None:
    terminal(monkeypatch, SimpleNamespace(may_repaint=lambda: True, pid=os.getpid()))
    console = output.make_console(soft_wrap=False)
    assert type(console) is output.Console and not console.soft_wrap


def test_a_launchers_terminal_is_written_to_directly_in_its_current_size(monkeypatch, pty) -> None:
    terminal(monkeypatch, SimpleNamespace(may_repaint=lambda: True, pid=1, open=pty.open))
    assert output.make_console().size == (77, 33)  # COLUMNS goes before the terminal's own width
    monkeypatch.delenv("COLUMNS")
    console = output.make_console()
    assert console.is_terminal and console.size == (91, 33)
    pty.resize(50, 20)
    assert console.size == (50, 20)
    console.print("to the terminal")
    assert "to the terminal" in pty.read()


def test_a_launchers_terminal_that_was_closed_is_no_error(monkeypatch, capsys) -> None:
    def gone() -> Any:
        raise OSError("gone")

    terminal(monkeypatch, SimpleNamespace(may_repaint=lambda: True, pid=1, open=gone))
    output.make_console().print("still here")
    assert capsys.readouterr().out == "still here\n"
