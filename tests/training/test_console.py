"""Who prints, and what a start does not import."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

from training.console import PLAIN_WIDTH, make_console


def test_rank_0_prints_and_the_others_do_not(capsys):
    for rank in range(3):
        console = make_console(SimpleNamespace(rank=rank))
        console.print(f"rank {rank}", highlight=False)
        assert console.width == PLAIN_WIDTH and not console.is_terminal
    assert capsys.readouterr().out == "rank 0\n"


def test_what_takes_long_to_import_waits_until_it_is_needed():
    heavy = ("rich", "pooch", "torch", "netcl", "sklearn", "pyopencl", "mpi4py.MPI")
    code = f"import sys, examples.mnist; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
