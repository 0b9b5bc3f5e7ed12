"""Two hosts on one machine: network namespaces joined by a cable, and MPICH's mpiexec with a launcher that enters them.

As a script it runs one command on them, for trying things out by hand (root, Linux, iproute2, MPICH):

    python tests/multihost/two_hosts.py 2 2 -m examples.mnist --model mlp      # two ranks on each
    python tests/multihost/two_hosts.py --delay-ms 0.5 --rate-mbit 1000 2 2 -m clcomm bench --transport auto mpi
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # it runs as a script
    sys.path.insert(0, str(ROOT))

from tests.multihost.cable import NO_LIMITS, Cable, Link, ip  # noqa: E402

#: Addresses that only these two namespaces know.
ADDRESSES = ("10.77.0.1", "10.77.0.2")
#: Those of a tunnel between them, where a test has made one.
TUNNEL_ADDRESSES = ("10.78.0.1", "10.78.0.2")
#: What a launcher tells its ranks: a job started from within another must not inherit it.
LAUNCHERS = ("PMI_", "PMIX_", "MPI_LOCAL", "OMPI_", "PRTE_", "HYDRA", "HYDI_", "MPIEXEC", "CLCOMM_", "SLURM_")
_made = itertools.count()


class TwoHosts:
    """Two namespaces while this context is entered; their names, which carry our process's number, go whatever happens.

    link: how slow the cable between them is.
    """

    def __init__(self, link: Link = NO_LIMITS) -> None:
        self._id = f"{os.getpid()}.{next(_made)}"
        self.names = (f"clcomm-{self._id}-a", f"clcomm-{self._id}-b")
        self.devices = (f"cl{self._id}a", f"cl{self._id}b")
        self._link = link
        self._cable: Cable | None = None
        self._launcher = Path()

    def __enter__(self) -> TwoHosts:
        try:
            for name in self.names:
                ip("netns", "add", name)
            self._cable = Cable(self.names, self.devices, self._link)
            self._cable.plug_in(ADDRESSES)
            self._launcher = self._write_launcher()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    @property
    def cable(self) -> Cable:
        """What joins them, while they are there."""
        assert self._cable is not None, "not entered"
        return self._cable

    def _remove(self) -> None:
        if self._cable is not None:
            self._cable.close()
        for name in self.names:  # a pair of devices goes with the namespace of either end
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        if self._launcher.is_file():
            self._launcher.unlink()

    def _write_launcher(self) -> Path:
        """Write what mpiexec calls instead of ssh: options, a host, a command.

        A host has its own name and no shared memory of System V, or MPI would find out that it is the same machine.
        """
        handle, path = tempfile.mkstemp(prefix="clcomm-launch-", suffix=".sh")
        pairs = zip((*ADDRESSES, *TUNNEL_ADDRESSES), self.names * 2, strict=True)
        names = " ".join(f"{address}) name={name} ;;" for address, name in pairs)
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

    def command(
        self,
        ranks: tuple[int, int],
        arguments: list[str],
        total: int | None = None,
        addresses: tuple[str, str] = ADDRESSES,
    ) -> list[str]:
        """Return the command that runs Python with these arguments, so many ranks on each host.

        total: more ranks than that go on at the first host again, so that (1, 1) and 4 alternate between the hosts.
        addresses: by which the launcher finds the hosts.
        """
        placed = ",".join(f"{address}:{count}" for address, count in zip(addresses, ranks, strict=True))
        return [
            *("ip", "netns", "exec", self.names[0], str(mpiexec()), "-localhost", addresses[0]),
            *("-launcher", "ssh", "-launcher-exec", str(self._launcher), "-hosts", placed),
            *("-n", str(total or sum(ranks)), sys.executable, *arguments),
        ]

    def bytes_received(self) -> int:
        """Return how much has come through the cable to the first host."""
        return int(self.cable.read(0, "statistics/rx_bytes"))


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
            ip("netns", "exec", hosts.names[1], "unshare", "--uts", "--ipc", "hostname", hosts.names[1])
    except RuntimeError as error:
        return f"no rights to make namespaces: {error}"
    return None


def environment() -> dict[str, str]:
    """Return our environment without what a launcher put there, one thread for each rank's NumPy."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def add_link(parser: argparse.ArgumentParser, default: Link = NO_LIMITS) -> None:
    """Add the options of a slow cable."""
    parser.add_argument("--delay-ms", type=float, default=default.delay_ms, help="each way; default: %(default)s")
    parser.add_argument(
        "--rate-mbit",
        type=float,
        default=default.rate_mbit,
        help="10^6 bits a second, 0: no limit; default: %(default)s",
    )
    parser.add_argument("--jitter-ms", type=float, default=default.jitter_ms, help="of the delay; default: %(default)s")
    parser.add_argument("--loss-percent", type=float, default=default.loss_percent, help="lost; default: %(default)s")


def link_of(options: argparse.Namespace) -> Link:
    """Return the cable of `add_link`'s options."""
    return Link(options.delay_ms, options.rate_mbit, options.jitter_ms, options.loss_percent)


def main() -> int:
    """Run a command on two hosts, as the arguments say, and return its exit code."""
    parser = argparse.ArgumentParser(description="Run Python on two hosts made of network namespaces.")
    add_link(parser)
    parser.add_argument("ranks", type=int, nargs=2, help="on each host")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Python's")
    options = parser.parse_args()
    with TwoHosts(link_of(options)) as made:
        print(f"cable: {made.cable.how}", file=sys.stderr, flush=True)
        told = {name: value for name, value in os.environ.items() if name.startswith("CLCOMM_")}
        command = made.command(tuple(options.ranks), options.arguments)
        return subprocess.run(command, env={**environment(), **told}).returncode


if __name__ == "__main__":
    sys.exit(main())
