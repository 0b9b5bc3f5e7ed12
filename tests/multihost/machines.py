"""Machines on this one that can be lost whole: each has its own processes, network, name, /dev/shm, and one core.

A machine is a set of namespaces with a first process, whose end takes all others with it. A bridge joins them; what
starts ranks on another one goes through it as ssh does, so a cut cable leaves nothing that tells of a loss.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tests.multihost import two_hosts
from tests.multihost.cable import MOST_UNDER_WAY, NO_LIMITS, Link, ip, start_relay
from tests.multihost.remote_shell import PORT
from tests.multihost.two_hosts import environment

SHELL = Path(__file__).with_name("remote_shell.py")
#: What a machine does before its first process: /dev/shm is its own, and so is the temporary directory in it.
_BOOT = f"mount -t tmpfs tmpfs /dev/shm && hostname $0 && exec {sys.executable} -I -S {SHELL} serve"
#: What ends a machine with this process, however that ends.
_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_STARTED_S = 60.0
_made = itertools.count()


class Machines:
    """Some machines while this context is entered, with the addresses 10.79.0.1 and up; link: of the last one."""

    def __init__(self, number: int, link: Link = NO_LIMITS):
        self.addresses = [f"10.79.0.{each + 1}" for each in range(number)]
        self._first: dict[str, subprocess.Popen] = {}
        self._links = {self.addresses[-1]: link}
        self._ends: dict[str, str] = {}  # of their cables, at the bridge
        self._relays: list[subprocess.Popen] = []
        self._stack = ExitStack()

    def __enter__(self) -> Machines:
        with ExitStack() as stack:
            self._switch = stack.enter_context(subprocess.Popen([*_WITH_US, "unshare", "--net", "sleep", "infinity"]))
            stack.callback(self._switch.kill)
            _until(lambda: _is_apart(self._switch.pid), "the switch's namespace")
            self._in_switch("link", "add", "bridge", "type", "bridge")
            self._in_switch("link", "set", "bridge", "up")
            stack.callback(self._end)
            for address in self.addresses:
                self.start(address)
            self._shell = Path(stack.enter_context(tempfile.TemporaryDirectory()), "shell")
            self._shell.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {SHELL} "$@"\n')
            self._shell.chmod(0o700)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def start(self, address: str) -> None:
        """Start a machine, for the first time or again after it was lost."""
        kinds = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child")
        command = [*_WITH_US, *self._on_core(address), "unshare", *kinds, "sh", "-c", _BOOT, address]
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        self._first[address] = process
        _until(lambda: self._inside(address) > 0 and _is_apart(self._inside(address)), f"machine {address}")
        inside, end = self._inside(address), f"cl{os.getpid()}x{next(_made)}"
        self._connect(inside, end, self._links.get(address, NO_LIMITS))
        ip("link", "set", end, "netns", str(self._switch.pid))
        self._ends[address] = end
        self._in_switch("link", "set", end, "master", "bridge", "up")
        _ip_in(inside, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip_in(inside, "link", "set", device, "up")
        listens = self.enter(address, "grep", "-q", f":{PORT:04X} ", "/proc/net/tcp")
        _until(lambda: subprocess.run(listens).returncode == 0, f"the shell of machine {address}")

    def _connect(self, inside: int, end: str, link: Link) -> None:
        """Make the device eth0 on the machine of a first process, with a cable to another device, `end`."""
        if link == NO_LIMITS:
            ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", str(inside))
            return
        far_end = f"{end}f"
        self._relays.append(start_relay((end, far_end), link))
        for device in (end, far_end):
            ip("link", "set", device, "txqueuelen", str(MOST_UNDER_WAY))
        ip("link", "set", far_end, "netns", str(inside))
        _ip_in(inside, "link", "set", far_end, "name", "eth0")

    def enter(self, address: str, *command: str) -> list[str]:
        """Return a command line that runs a command on a machine."""
        inside = ["nsenter", "-t", str(self._inside(address)), "-n", "-m", "-u", "-i", "-p", "--"]
        return [*self._on_core(address), *inside, *command]

    def memory(self, address: str) -> Path:
        """Return the path of a machine's /dev/shm from outside."""
        return Path(f"/proc/{self._inside(address)}/root/dev/shm")

    def cut(self, address: str) -> None:
        """Cut a machine's cable: from now on nothing comes from it, and it hears nothing."""
        self._in_switch("link", "set", self._ends[address], "nomaster")

    def mend(self, address: str) -> None:
        self._in_switch("link", "set", self._ends[address], "master", "bridge")

    def kill(self, address: str) -> None:
        """End all processes of a machine at once; its network tells the others, unless its cable is cut."""
        os.kill(self._inside(address), signal.SIGKILL)
        self._first[address].wait()

    def environment(self) -> dict[str, str]:
        """Return the environment of `clcomm run` on one of them."""
        launcher = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(self._shell), "HYDRA_IFACE": "eth0"}
        return {**environment(), **launcher, "TMPDIR": "/dev/shm"}

    def _on_core(self, address: str) -> list[str]:
        cores = sorted(os.sched_getaffinity(0))
        return ["taskset", "-c", str(cores[self.addresses.index(address) % len(cores)])]

    def _inside(self, address: str) -> int:
        """Return the first process of a machine, as it is numbered outside; 0: there is none yet."""
        found = Path(f"/proc/{self._first[address].pid}/task/{self._first[address].pid}/children").read_text().split()
        return int(found[0]) if found else 0

    def _in_switch(self, *arguments: str) -> None:
        _ip_in(self._switch.pid, *arguments)

    def _end(self) -> None:
        for process in self._first.values():
            process.kill()  # and its child with it
            process.wait()
        for relay in self._relays:
            relay.communicate()


def refusal() -> str | None:
    """Say why machines cannot be made here; None where they can."""
    lacking = (f"{tool} is not installed" for tool in ("nsenter", "setpriv", "taskset") if shutil.which(tool) is None)
    return next(lacking, None) or two_hosts.refusal()


def _ip_in(process: int, *arguments: str) -> None:
    done = subprocess.run(["nsenter", "-t", str(process), "-n", "ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _is_apart(process: int) -> bool:
    return os.readlink(f"/proc/{process}/ns/net") != os.readlink("/proc/self/ns/net")


def _until(condition, what: str) -> None:
    ends = time.monotonic() + _STARTED_S
    while not condition():
        if time.monotonic() > ends:
            raise RuntimeError(f"{what} does not come up")
        time.sleep(0.01)
