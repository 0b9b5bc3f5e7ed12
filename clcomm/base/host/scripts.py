"""Scripts and modules that a process runs as its program, in place of Python."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from types import TracebackType

from clcomm.base.errors import ArgumentError


def run_script(job: list[str]) -> None:
    """Run `job`, a script or -m and a module, then arguments, as Python does; ArgumentError where there is none."""
    if job[:1] != ["-m"]:
        if not job or not os.path.exists(job[0]):
            raise ArgumentError(f"script: expected a Python script that exists, or -m MODULE, got {' '.join(job)!r}")
        sys.argv = job
        if not getattr(sys.flags, "safe_path", False) and os.path.isfile(job[0]):
            sys.path[0] = os.path.dirname(os.path.realpath(job[0]))
        runpy.run_path(job[0], run_name="__main__")
        return
    sys.argv = job[1:]
    name = "".join(job[1:2])
    try:
        found = bool(name) and importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # the package before the dot is there, and imports something that is not
        found = False
    if not found:
        raise ArgumentError(f"-m: expected a module that this Python finds, got {name!r}")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def without_frames_of(path: str, error: BaseException) -> None:
    """Cut the frames of a file, which runs scripts, of runpy and of the import system before the script's first one."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and _is_own(trace, path):
        trace = trace.tb_next
    error.__traceback__ = trace


def _is_own(trace: TracebackType, path: str) -> bool:
    code, module = trace.tb_frame.f_code, trace.tb_frame.f_globals.get("__name__")
    return code.co_filename in (path, __file__) or module in ("runpy", "clcomm.comm.watch.endings")
