"""Who prints, and what a start does not import."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace

from training.console import PLAIN_WIDTH, make_console
from training.logging_setup import configure_logging

#: What turns a style on or off.
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def test_rank_0_prints_and_the_others_do_not(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    for rank in range(3):
        console = make_console(SimpleNamespace(rank=rank))
        console.print(f"rank {rank}", highlight=False)
        assert console.width == PLAIN_WIDTH and not console.is_terminal
    assert capsys.readouterr().out == "rank 0\n"


def on_a_terminal(**environment: str) -> str:
    """Return what a console writes in a bold style when its standard output is a terminal."""
    code = "from types import SimpleNamespace as N; from training.console import make_console as make\n"
    code += "console = make(N(rank=0)); console.print(console.is_terminal, console.width, style='bold')"
    ours, theirs = pty.openpty()
    given = {**os.environ, "CI": "", "TERM": "xterm", "COLUMNS": "60", "PYTHONPATH": os.getcwd(), **environment}
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=given, check=True)
    written = os.read(ours, 200).decode()
    os.close(theirs)
    os.close(ours)
    return written


def test_a_terminal_has_colours_but_the_one_that_open_mpi_lends_has_none():
    written = on_a_terminal()
    assert ESCAPE.sub("", written) == "True 60\r\n" and ESCAPE.search(written)
    assert on_a_terminal(OMPI_COMM_WORLD_SIZE="2", COLUMNS="") == f"False {PLAIN_WIDTH}\r\n"
    assert on_a_terminal(OMPI_COMM_WORLD_SIZE="2", COLUMNS="80") == "False 80\r\n"


def test_what_takes_long_to_import_waits_until_it_is_needed():
    heavy = ("rich", "pooch", "torch", "netcl", "sklearn", "pyopencl", "mpi4py.MPI")
    code = f"import sys, examples.mnist; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_log_records_go_to_what_standard_error_is_at_the_moment(monkeypatch):
    kept = logging.getLogger("clcomm")
    monkeypatch.setattr(kept, "propagate", kept.propagate)  # as all that configure_logging() changes
    monkeypatch.setattr(kept, "level", kept.level)
    monkeypatch.setattr(kept, "handlers", list(kept.handlers))
    earlier, now = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", earlier)
    logger = configure_logging(1, 2)
    monkeypatch.setattr(sys, "stderr", now)
    logger.warning("late")
    assert (earlier.getvalue(), now.getvalue()) == ("", "clcomm: rank 1: late\n")
