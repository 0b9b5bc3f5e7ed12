"""The cable between two namespaces: as fast as the kernel is, or with a delay and a rate."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

RELAY = Path(__file__).with_name("slow_cable.py")
#: Packets that may be on their way: none gets lost for being many.
MOST_UNDER_WAY = 100_000
#: Fewer and larger packets than a network's cost the relay less of the processor that the ranks need.
_RELAYED_BYTES = 9000


class Link(NamedTuple):
    """How slow a cable is.

    delay_ms: from one end to the other. rate_mbit: 10^6 bits a second each way; 0: no limit. jitter_ms: by which a
    packet's delay differs at most. loss_percent: of packets that do not arrive.
    """

    delay_ms: float = 0.0
    rate_mbit: float = 0.0
    jitter_ms: float = 0.0
    loss_percent: float = 0.0

    def __str__(self) -> str:
        jitter = f" +- {self.jitter_ms:g}" if self.jitter_ms else ""
        rate = f"{self.rate_mbit:g} Mbit/s" if self.rate_mbit else "no limit of rate"
        loss = f", {self.loss_percent:g}% of packets lost" if self.loss_percent else ""
        return f"{self.delay_ms:g}{jitter} ms each way, {rate}{loss}"


NO_LIMITS = Link()


class Cable:
    """A network device in each of two namespaces, which exist, and what one sends the other receives.

    ends: the devices' names. `how` says in words what delays and limits. netem does where the kernel has it, else a
    process that relays packets.
    """

    def __init__(self, names: tuple[str, str], ends: tuple[str, str], link: Link = NO_LIMITS):
        self.names, self.ends = names, ends
        self._relay: subprocess.Popen | None = None
        self.how = "a veth pair"
        self._make_pair()
        if link == NO_LIMITS:
            return
        if self._limited_by_netem(link):
            self.how = f"{link}, by netem"
        else:
            ip("-n", names[0], "link", "del", ends[0])
            self._make_relay(link)
            self.how = f"{link}, by {RELAY.name}, as this kernel has no netem"

    def _make_pair(self) -> None:
        (name, other), (end, far_end) = self.names, self.ends
        ip("-n", name, "link", "add", end, "type", "veth", "peer", "name", far_end, "netns", other)

    def _limited_by_netem(self, link: Link) -> bool:
        if shutil.which("tc") is None:
            return False
        limits = ["delay", f"{link.delay_ms:g}ms", f"{link.jitter_ms:g}ms", "loss", f"{link.loss_percent:g}%"]
        limits += ["rate", f"{link.rate_mbit:g}mbit"] if link.rate_mbit else []
        for name, end in zip(self.names, self.ends, strict=True):
            discipline = ["netem", "limit", str(MOST_UNDER_WAY), *limits]
            command = ["tc", "-n", name, "qdisc", "add", "dev", end, "root", *discipline]
            if subprocess.run(command, capture_output=True).returncode:
                return False
        return True

    def _make_relay(self, link: Link) -> None:
        self._relay = start_relay(self.ends, link)
        for name, end in zip(self.names, self.ends, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "link", "set", end, "mtu", str(_RELAYED_BYTES), "txqueuelen", str(MOST_UNDER_WAY))

    def plug_in(self, addresses: tuple[str, str], limit_s: float = 10.0) -> None:
        """Give both ends their addresses, and return when they are up, a moment after they were told to be."""
        for name, end, address in zip(self.names, self.ends, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
        deadline = time.monotonic() + limit_s
        up = "up" if self._relay is None else "unknown"  # which is all that a TAP device says
        while not all(self.read(side, "operstate") == up for side in (0, 1)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the cable between {' and '.join(self.names)} stays down")
            time.sleep(0.01)

    def read(self, side: int, what: str) -> str:
        """Return what the kernel says of one end."""
        path = f"/sys/class/net/{self.ends[side]}/{what}"
        return ip("netns", "exec", self.names[side], "cat", path).strip()

    def close(self) -> None:
        """End the relay, if there is one; a pair goes with the namespaces."""
        if self._relay is not None:
            self._relay.communicate()


def start_relay(devices: tuple[str, str], link: Link) -> subprocess.Popen:
    """Start a process that makes two devices, which may go into other namespaces, and is a slow cable between them.

    It ends when its standard input does.
    """
    limits = link.delay_ms / 1e3, link.rate_mbit * 1e6 / 8, link.jitter_ms / 1e3, link.loss_percent / 100
    command = [sys.executable, str(RELAY), *devices, *map(str, limits)]
    relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert relay.stdout is not None and relay.stderr is not None
    if relay.stdout.readline() != b"ready\n":
        lines = relay.stderr.read().decode().splitlines()
        relay.communicate()
        raise RuntimeError(f"{RELAY.name}: {lines[-1] if lines else 'ended at once'}")
    return relay


def ip(*arguments: str) -> str:
    """Run iproute2's ip and return what it says; RuntimeError where it refuses."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {shlex.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
