"""clcomm's hooks in a job of several ranks: those that docs/robustness.md lists, and no type or function of Python."""

from __future__ import annotations

import json

import pytest

from tests.faults.failing import on_one
from tests.faults.launch import END_S, job

#: Records a rank's hooks at the import of clcomm, with an open Communicator, and after that is closed.
NOTES = """
import atexit, faulthandler, json, signal, sys, threading

calls = []
def noting(module, name):
    original = getattr(module, name)
    def noted(*args, **named):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("clcomm"):
            calls.append(f"{module.__name__}.{name}")
        return original(*args, **named)
    setattr(module, name, noted)
for module, names in {
    atexit: ["register"], faulthandler: ["register", "enable"], threading: ["_register_atexit"],
    signal: ["signal", "set_wakeup_fd", "setitimer", "pthread_sigmask"], os: ["register_at_fork"],
}.items():
    for name in names:
        noting(module, name)

def state():
    import mpi4py
    return {
        **{f"{module.__name__}.{name}": str(value) for module in (sys, os, threading, atexit, signal)
           for name, value in vars(module).items() if callable(value) and not isinstance(value, type)},
        "SystemExit": str(sorted(map(str, vars(SystemExit).items()))),
        "signals": str([signal.getsignal(number) for number in sorted(signal.valid_signals())]),
        "mpi4py.rc": str(vars(mpi4py.rc)),
    }

before = state()
from clcomm import Communicator
imported, at_import = state(), sorted(set(calls))
with Communicator() as comm:
    comm.barrier()
    opened = state()
closed = state()
def changed(after):
    return [name for name in before if before[name] != after.get(name)]
if comm.rank == 0:
    print(json.dumps([changed(imported), at_import, changed(opened), sorted(set(calls)), changed(closed)]))
"""
AT_IMPORT = ["mpi4py.rc", "sys.excepthook", "threading.excepthook"]


def noted(tmp_path, ranks=2, **environment):
    """Return a rank's changes and calls at import and with an open Communicator, and its changes after closing it."""
    ended = job(tmp_path, NOTES, ranks=ranks, preamble="import os\n", **environment)  # which imports no clcomm
    assert (ended.code, ended.err) == (0, "")
    return json.loads(ended.out)


def test_a_rank_hooks_what_the_docs_list(tmp_path):
    changed, calls, changed_open, calls_open, changed_closed = noted(tmp_path)
    assert sorted(changed) == AT_IMPORT
    assert calls == ["atexit.register"]
    assert sorted(changed_open) == sorted([*AT_IMPORT, "signals"])
    assert set(calls_open) <= {
        "atexit.register", "faulthandler.register", "os.register_at_fork", "signal.pthread_sigmask",
        "signal.set_wakeup_fd", "signal.setitimer", "signal.signal", "threading._register_atexit",
    }  # fmt: skip
    assert sorted(changed_closed) == AT_IMPORT


def test_hooks_that_are_off_change_nothing(tmp_path):
    assert noted(tmp_path, CLCOMM_HOOKS="off") == [[]] * 5


def test_one_rank_hooks_what_prints_errors_alone_and_not_before_its_first_communicator(tmp_path):
    assert noted(tmp_path, ranks=1) == [[], [], ["sys.excepthook"], [], ["sys.excepthook"]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mistake_is_one_line_unless_the_traceback_is_asked_for(tmp_path, ranks):
    body = "Communicator().all_reduce([1, 2, 3])"
    ended = job(tmp_path, body, ranks=ranks)
    assert ended.clcomm_lines() == ["clcomm: array: expected a NumPy array, got list"] == ended.err.splitlines()
    assert ended.code
    assert "Traceback" in job(tmp_path, body, ranks=ranks, CLCOMM_TRACEBACK="1").err


@pytest.mark.parametrize("ends", ["pass", "sys.exit(0)", "sys.exit(3)"])
def test_a_job_without_hooks_ends_as_python_does(tmp_path, ends):
    ended = job(tmp_path, f"comm = Communicator()\ncomm.barrier()\n{ends}", ranks=2, CLCOMM_HOOKS="off")
    assert (ended.code, ended.err) == (3 if "3" in ends else 0, "")


def test_run_ends_a_job_without_hooks(tmp_path):
    ended = job(tmp_path, on_one("sys.exit(5)"), ranks=2, CLCOMM_HOOKS="off")
    assert (ended.code, ended.clcomm_lines()) == (5, ["clcomm: rank 1: left with exit code 5"])
    assert ended.after_failing_s < END_S
