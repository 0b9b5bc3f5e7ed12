"""Two hosts on one machine: network namespaces joined by a cable, and MPICH's mpiexec with a launcher that enters them.

As a script it runs one command on them, for trying things out by hand (root, Linux, iproute2, MPICH):

    python tests/multihost/two_hosts.py 2 2 -m examples.mnist --model mlp      # two ranks on each
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
#: Addresses that only these two namespaces know.
ADDRESSES = ("10.77.0.1", "10.77.0.2")
#: What a launcher tells its ranks: a job started from within another must not inherit it.
LAUNCHERS = ("PMI_", "PMIX_", "MPI_LOCAL", "OMPI_", "PRTE_", "HYDRA", "HYDI_", "MPIEXEC", "CLCOMM_", "SLURM_")


class TwoHosts:
    """Two namespaces while this context is entered; the names carry our process's number and go whatever happens."""

    def __init__(self) -> None:
        self.names = tuple(f"clcomm-{os.getpid()}-{side}" for side in "ab")
        self._cables = tuple(f"cl{os.getpid()}{side}" for side in "ab")
        self._launcher = Path()

    def __enter__(self) -> TwoHosts:
        try:
            for name in self.names:
                _ip("netns", "add", name)
            first, second = self._cables
            _ip(
                "-n",
                self.names[0],
                "link",
                "add",
                first,
                "type",
                "veth",
                "peer",
                "name",
                second,
                "netns",
                self.names[1],
            )
            for name, cable, address in zip(self.names, self._cables, ADDRESSES, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", cable, "up")
            self._wait_for_cables()
            self._launcher = self._write_launcher()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def _wait_for_cables(self, limit_s: float = 10.0) -> None:
        """Wait until both ends say that they are up, a moment after they were told to be."""
        deadline = time.monotonic() + limit_s
        while not all(self._read(side, "operstate") == "up" for side in (0, 1)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the cable between {' and '.join(self.names)} stays down")
            time.sleep(0.01)

    def _read(self, side: int, what: str) -> str:
        path = f"/sys/class/net/{self._cables[side]}/{what}"
        return _ip("netns", "exec", self.names[side], "cat", path).strip()

    def _remove(self) -> None:
        for name in self.names:  # the cable goes with the namespace of either end
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        self._launcher.is_file() and self._launcher.unlink()

    def _write_launcher(self) -> Path:
        """Write what mpiexec calls instead of ssh: options, a host, a command.

        A host has its own name and no shared memory of System V, or MPI would find out that it is the same machine.
        """
        handle, path = tempfile.mkstemp(prefix="clcomm-launch-", suffix=".sh")
        names = " ".join(f"{address}) name={name} ;;" for address, name in zip(ADDRESSES, self.names, strict=True))
        with os.fdopen(handle, "w") as script:
            script.write(
                "#!/bin/sh\n"
                'while [ "${1#-}" != "$1" ]; do shift; done\n'
                f"case $1 in {names} esac\n"
                "shift\n"
                'exec ip netns exec "$name" unshare --uts --ipc sh -c "hostname $name; $*"\n'
            )
        os.chmod(path, 0o700)
        return Path(path)

    def command(self, ranks: tuple[int, int], arguments: list[str], total: int | None = None) -> list[str]:
        """Return the command that runs Python with these arguments, so many ranks on each host.

        total: more ranks than that go on at the first host again, so that (1, 1) and 4 alternate between the hosts.
        """
        placed = ",".join(f"{address}:{count}" for address, count in zip(ADDRESSES, ranks, strict=True))
        return [
            *("ip", "netns", "exec", self.names[0], str(mpiexec()), "-localhost", ADDRESSES[0]),
            *("-launcher", "ssh", "-launcher-exec", str(self._launcher), "-hosts", placed),
            *("-n", str(total or sum(ranks)), sys.executable, *arguments),
        ]

    def bytes_received(self) -> int:
        """Return how much has come through the cable to the first host."""
        return int(self._read(0, "statistics/rx_bytes"))


def mpiexec() -> Path | None:
    """Return the mpiexec beside this Python, or that on the PATH."""
    own = Path(sys.executable).with_name("mpiexec")
    found = str(own) if own.exists() else shutil.which("mpiexec")
    return None if found is None else Path(found)


def refusal() -> str | None:
    """Say why two hosts cannot be made here; None where they can."""
    for tool in ("ip", "unshare", "hostname"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if os.geteuid():
        return "namespaces need root"
    launcher = mpiexec()
    if launcher is None:
        return "no mpiexec"
    version = subprocess.run([str(launcher), "--version"], capture_output=True, text=True, env=environment())
    if "HYDRA" not in version.stdout:
        return "mpiexec is not MPICH's"
    try:
        with TwoHosts() as hosts:
            _ip("netns", "exec", hosts.names[1], "unshare", "--uts", "--ipc", "hostname", hosts.names[1])
    except RuntimeError as error:
        return f"no rights to make namespaces: {error}"
    return None


def environment() -> dict[str, str]:
    """Return our environment without what a launcher put there, one thread for each rank's NumPy."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {shlex.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    with TwoHosts() as made:
        on_each = (int(sys.argv[1]), int(sys.argv[2]))
        sys.exit(subprocess.run(made.command(on_each, sys.argv[3:]), env=environment()).returncode)
