"""A cable with a rate, delay, jitter and loss, for kernels without netem: it passes packets between two devices.

    python tests/multihost/slow_cable.py NAME NAME DELAY_S BYTES_PER_S JITTER_S LOST_SHARE

It makes two TAP devices of these names, which may then go into other namespaces or a bridge, says "ready", and carries
packets until its standard input ends; the devices go with it. Each direction sends one packet after the other at the
rate (0: no limit), and each packet arrives the delay later, more or less by the jitter at most, in order. A packet's
jitter, and whether it is lost, are drawn from a seed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
MOST_BYTES = 1 << 16
PRIORITY = -10  # it stands for hardware: ranks that compute must not keep it waiting


class Direction:
    """What is on its way from one device to the other."""

    def __init__(
        self, source: int, target: int, delay_s: float, bytes_per_s: float, jitter_s: float, lost_share: float
    ):
        self.source, self.target = source, target
        self._jitter_s, self._lost_share, self._random = jitter_s, lost_share, random.Random(0)
        self._delay_s, self._s_per_byte = delay_s, 1 / bytes_per_s if bytes_per_s else 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()  # when each arrives
        self._free_s = 0.0  # when the last of them has been sent

    def take(self, now_s: float) -> None:
        """Send all packets that wait at the source."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, MOST_BYTES)
                self._free_s = max(now_s, self._free_s) + self._s_per_byte * len(packet)
                if self._random.random() >= self._lost_share:
                    arrives_s = self._free_s + self._delay_s + self._random.uniform(-self._jitter_s, self._jitter_s)
                    earliest_s = self._under_way[-1][0] if self._under_way else 0.0
                    self._under_way.append((max(arrives_s, earliest_s), packet))

    def deliver(self, now_s: float) -> None:
        """Hand over all packets that have arrived."""
        while self._under_way and self._under_way[0][0] <= now_s:
            with contextlib.suppress(OSError):  # the device is down: nobody is there any more
                os.write(self.target, self._under_way.popleft()[1])

    @property
    def next_s(self) -> float:
        """When the next packet arrives."""
        return self._under_way[0][0] if self._under_way else float("inf")


def tap(name: str) -> int:
    """Return the descriptor of a new TAP device, which does not block."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def carry(one: int, other: int, *limits: float) -> None:
    """Pass packets in both directions until standard input ends; limits: a Direction's."""
    directions = [Direction(one, other, *limits), Direction(other, one, *limits)]
    while True:
        wait_s = max(0.0, min(direction.next_s for direction in directions) - time.monotonic())
        ready, _, _ = select.select([one, other, 0], [], [], wait_s if wait_s < float("inf") else None)
        if 0 in ready:
            return
        now_s = time.monotonic()
        for direction in directions:
            if direction.source in ready:
                direction.take(now_s)
            direction.deliver(now_s)


def main() -> None:
    first, second, *limits = sys.argv[1:]
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    devices = tap(first), tap(second)
    print("ready", flush=True)
    carry(*devices, *map(float, limits))


if __name__ == "__main__":
    main()
