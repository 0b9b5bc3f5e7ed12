"""What importing clcomm loads, that it hooks nothing, and that no class stands for a process's state."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.faults.launch import ROOT, clean_environment

#: Imports a module, and prints which modules of ours that loads, and what it changes in the process.
IMPORTS = """
import atexit, importlib, json, os, signal, sys, threading

def state():
    return {
        "sys.excepthook": str(sys.excepthook), "threading.excepthook": str(threading.excepthook),
        "signals": str([signal.getsignal(number) for number in sorted(signal.valid_signals())]),
        "wakeup": str(signal.set_wakeup_fd(-1)), "threads": str(threading.enumerate()),
        "exit handlers": str(atexit._ncallbacks()), "files": str(sorted(os.listdir("/proc/self/fd"))),
        "MPI": str("mpi4py.MPI" in sys.modules),
    }

for library in sys.argv[2:]:
    importlib.import_module(library)
before = state()
importlib.import_module(sys.argv[1])
after = state()
loaded = [name for name in sys.modules if name.split(".")[0] == "clcomm"]
print(json.dumps([[name for name in before if before[name] != after[name]], loaded]))
"""

#: Imports all modules where PyOpenCL and mpi4py are missing, and what the modules of POSIX have on Linux alone.
WITHOUT = """
import fcntl, importlib, os, pkgutil, select, signal, sys

sys.modules.update(dict.fromkeys(("pyopencl", "mpi4py", "mpi4py.MPI")))
linux = {
    os: ("memfd_", "MFD_", "sched_", "SCHED_", "pidfd_", "eventfd", "EFD_", "splice", "posix_fallocate", "O_PATH"),
    select: ("epoll", "EPOLL"), signal: ("pidfd_", "sigtimedwait", "SIGRT", "SIGPWR", "SIGSTKFLT"),
    fcntl: ("F_OFD", "F_SEAL", "F_ADD_SEALS", "F_GET_SEALS", "F_SETPIPE", "F_GETPIPE"),
}
for module, names in linux.items():
    for name in [each for each in dir(module) if each.startswith(names)]:
        delattr(module, name)
import clcomm
for found in pkgutil.walk_packages(clcomm.__path__, "clcomm.", onerror=str):
    if not found.name.endswith("__main__") and "tinygrad" not in found.name and "jax" not in found.name:  # load it
        importlib.import_module(found.name)
        print(found.name)
"""


def imported(module: str, *libraries: str) -> tuple[list[str], list[str]]:
    """Return what an import changes in a new process, with these libraries imported before, and what it loads."""
    command = [sys.executable, "-c", IMPORTS, module, *libraries]
    ended = subprocess.run(command, env=clean_environment(), cwd=ROOT, capture_output=True, text=True, check=True)
    changed, loaded = json.loads(ended.stdout)
    return changed, loaded


def test_importing_the_communicator_hooks_nothing_and_loads_few_modules() -> None:
    changed, loaded = imported("clcomm.comm.communicator", "numpy", "logging")
    assert changed == []
    assert len(loaded) <= 41, sorted(loaded)


def test_importing_the_backend_for_torch_hooks_nothing_and_loads_few_modules() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    changed, loaded = imported("clcomm.torch", "numpy", "torch.distributed")
    assert changed == []  # MPI starts with the first group: workers of start method spawn import it too
    assert len(loaded) <= 73, sorted(loaded)


def test_the_job_module_itself_loads_nothing() -> None:
    assert sorted(imported("clcomm.comm.watch")[1]) == [
        "clcomm", "clcomm._moved", "clcomm._version", "clcomm.comm", "clcomm.comm.watch",
    ]  # fmt: skip


def test_the_state_of_a_process_belongs_to_objects() -> None:
    """Attributes are assigned to no class by its name, but for the methods that the engine gives to tensors."""
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted((ROOT / "clcomm").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
        and node.value.id.strip("_")[:1].isupper() and not node.value.id.isupper() and node.value.id != "Tensor"
    ]  # fmt: skip
    assert found == []


def test_every_module_is_imported_without_opencl_without_mpi_and_without_linux_s_own_calls() -> None:
    """So that documentation, costs, schedules and reports work on any system of POSIX; modules of PyTorch need it."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=clean_environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "clcomm.comm.costs.model" in ended.stdout.split() and len(ended.stdout.split()) > 300
