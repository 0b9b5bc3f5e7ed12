"""The hosts that `clcomm run --hosts` and `--hostfile` name, and the ranks that each can have."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from clcomm.base.errors import ArgumentError

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
