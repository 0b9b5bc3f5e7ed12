"""WireGuard between the two hosts, by wireguard-go in their namespaces, and what travels on the cable between them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from tests.multihost.cable import ip
from tests.multihost.two_hosts import ADDRESSES, TUNNEL_ADDRESSES, TwoHosts

PORT, SOCKETS = 51820, Path("/var/run/wireguard")
#: Prints how often a text was in the packets of an interface, once it is told to end.
_LISTEN = """
import signal, socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packets.bind((sys.argv[1], 0))
packets.settimeout(0.2)
packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
ended, found = [], 0
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
print("listens", flush=True)
while not ended:
    try:
        found += packets.recv(1 << 16).count(sys.argv[2].encode())
    except TimeoutError:
        pass
print(found)
"""


def lacking() -> str | None:
    """Say what a tunnel needs that is not here; None where it can be made."""
    for tool in ("wireguard-go", "wg"):
        if shutil.which(tool) is None:
            return f"needs {tool}, of Debian's wireguard-go and wireguard-tools, on PATH"
    return None if os.path.exists("/dev/net/tun") else "needs /dev/net/tun"


class Tunnel:
    """A WireGuard interface on each host while this is entered, with TUNNEL_ADDRESSES and `names` of its own.

    The hosts share a folder for the sockets of control, which are called as the interfaces.
    """

    def __init__(self, hosts: TwoHosts):
        self._hosts, self._programs = hosts, []
        self.names = tuple(f"{device}w" for device in hosts.devices)

    def __enter__(self) -> Tunnel:
        try:
            keys = [_said("wg", "genkey") for _ in ADDRESSES]
            others = [_said("wg", "pubkey", given=key) for key in keys][::-1]
            for at, host in enumerate(self._hosts.names):
                self._make(host, at, keys[at], others[at])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for program in self._programs:
            program.terminate()
            program.wait()

    def _make(self, host: str, at: int, key: str, other: str) -> None:
        name, inside = self.names[at], ["ip", "netns", "exec", host]
        environment = {**os.environ, "WG_I_PREFER_BUGGY_USERSPACE_TO_POLISHED_KMOD": "1"}
        program = subprocess.Popen([*inside, "wireguard-go", "-f", name], stderr=subprocess.DEVNULL, env=environment)
        self._programs.append(program)
        end_s = time.monotonic() + 10
        while not (SOCKETS / f"{name}.sock").exists():
            assert program.poll() is None and time.monotonic() < end_s, "wireguard-go did not start"
            time.sleep(0.02)
        with tempfile.NamedTemporaryFile("w", suffix=".key") as file:
            file.write(key)
            file.flush()
            allowed, endpoint = f"{TUNNEL_ADDRESSES[1 - at]}/32", f"{ADDRESSES[1 - at]}:{PORT}"
            _said(*inside, "wg", "set", name, "listen-port", str(PORT), "private-key", file.name, "peer", other,
                  "allowed-ips", allowed, "endpoint", endpoint)  # fmt: skip
        ip("-n", host, "addr", "add", f"{TUNNEL_ADDRESSES[at]}/24", "dev", name)
        ip("-n", host, "link", "set", name, "up")


def _said(*command: str, given: str | None = None) -> str:
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout.strip()


class Listener:
    """Counts a text in what the cable brings to and takes from the first host while this is entered: `found`."""

    found = 0

    def __init__(self, hosts: TwoHosts, text: str):
        enter = ["ip", "netns", "exec", hosts.names[0]]
        self._program = subprocess.Popen(
            [*enter, sys.executable, "-c", _LISTEN, hosts.devices[0], text], stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Listener:
        assert self._program.stdout is not None and self._program.stdout.readline() == "listens\n"
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._program.send_signal(signal.SIGTERM)
        self.found = int(self._program.communicate()[0])
