"""The status of ranks on other hosts, queried over the network, and only when a collective stalls.

A thread of each rank waits for such queries and answers with the lines of its host's status page. It needs neither the
main thread nor MPI, so it answers in any state of the ranks; one answering rank per host is enough.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from clcomm.comm.stats.flight_recorder import new_dump_folder
from clcomm.comm.watch import endings
from clcomm.comm.watch.stall_message import UNKNOWN
from clcomm.comm.watch.status_page import RankStatus, StatusPage

if TYPE_CHECKING:
    from clcomm.comm.transport.mpi_runtime import Intracomm

#: The queries: the status of a host's ranks; the same, and dump their last operations.
PROGRESS, DUMP = b"?", b"!"
#: How long to wait for one rank of a host before asking the next, and how long to ask in all.
NEXT_S, ASK_S = 0.2, 2.0
#: Bytes of the job's secret, and of the largest datagram (UDP over IPv4).
TOKEN_BYTES, LARGEST = 16, 65_507
#: The most bytes of one text in an answer, and of all its texts, as they are encoded.
_MOST_TEXT_BYTES, _MOST_TEXTS_BYTES = 600, 40_000
#: The most bytes of one character in JSON: an escape such as "\u0000".
_MOST_CHARACTER_BYTES = 6
_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR of netdevice(7)


class Address(NamedTuple):
    """A rank's address: its host's IPv4 addresses, some of which are reachable, and its port."""

    hosts: list[str]
    port: int


class StatusClient:
    """Queries the ranks of other hosts.

    Args:
        token: a secret of the job, of TOKEN_BYTES; queries without it get no answer.
        hosts: the other hosts, each as the addresses of its ranks.
    """

    def __init__(self, token: bytes, hosts: Sequence[dict[int, Address]] = ()):
        self._token, self._hosts = token, list(hosts)

    def as_json(self) -> dict[str, object]:
        """Return token and addresses in JSON-compatible form; who has them can query."""
        hosts = [[[rank, *address] for rank, address in host.items()] for host in self._hosts]
        return {"token": self._token.hex(), "hosts": hosts}

    @classmethod
    def of_json(cls, given: Mapping[str, Any]) -> StatusClient:
        """Return the client that `as_json` describes."""
        hosts = [{rank: Address(names, port) for rank, names, port in host} for host in given["hosts"]]
        return StatusClient(bytes.fromhex(given["token"]), hosts)

    def ask(self, question: bytes = PROGRESS) -> list[RankStatus]:
        """Return the lines of all ranks of other hosts, in rank order, within ASK_S seconds.

        Ranks of a host that does not answer, or that cannot be asked as no descriptor is free, have the state UNKNOWN.
        """
        found: dict[int, RankStatus] = {}
        silent = self._hosts
        deadline, attempt = monotonic() + ASK_S, 0
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            while silent and monotonic() < deadline:
                for host in silent:
                    self._send(asking, [*host.values()][attempt % len(host)], question)
                found |= self._answers(asking, min(deadline, monotonic() + NEXT_S), silent)
                silent = [host for host in silent if not host.keys() <= found.keys()]
                attempt += 1
        return [found.get(rank) or _unknown(rank) for rank in sorted(rank for host in self._hosts for rank in host)]

    def _send(self, asking: socket.socket, address: Address, question: bytes) -> None:
        for host in address.hosts:
            with contextlib.suppress(OSError):  # no route to that address
                asking.sendto(self._token + question, (host, address.port))

    def _answers(
        self, asking: socket.socket, deadline: float, silent: Sequence[dict[int, Address]]
    ) -> dict[int, RankStatus]:
        """Return the lines that arrive before the deadline, or until all these hosts have answered."""
        wanted, found = {rank for host in silent for rank in host}, dict[int, RankStatus]()
        while not wanted <= found.keys() and (left_s := deadline - monotonic()) > 0:
            asking.settimeout(left_s)
            with contextlib.suppress(OSError):  # the time is over
                answer = asking.recv(LARGEST)
                if secrets.compare_digest(answer[:TOKEN_BYTES], self._token):
                    found |= {line.rank: line for line in unpacked(answer[TOKEN_BYTES:]) if line.rank in wanted}
        return found


class OtherHosts(StatusClient):
    """The ranks of other hosts, and this rank's thread that answers their queries.

    Args:
        page: this host's.
        token: as for StatusClient.
    """

    def __init__(self, page: StatusPage, token: bytes):
        super().__init__(token)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        closed = threading.Event()
        threading.Thread(
            target=_answer, args=(self._socket, closed, token, page), name="clcomm-answers", daemon=True
        ).start()
        self.close = weakref.finalize(self, _close, self._socket, closed)
        self.close.atexit = False

    @classmethod
    def of(cls, comm: Intracomm, hosts: Sequence[Sequence[int]], page: StatusPage) -> OtherHosts:
        """Return an OtherHosts that knows the ranks of all hosts but this one; collective.

        Args:
            comm: an mpi4py communicator of all ranks.
            hosts: the ranks of each host, this one's included.
            page: this host's.
        """
        made = cls(page, comm.bcast(secrets.token_bytes(TOKEN_BYTES), 0))
        addresses = comm.allgather(made.address(own_addresses()))
        made.know([{rank: addresses[rank] for rank in ranks} for ranks in hosts if page.own not in ranks])
        return made

    def address(self, hosts: list[str]) -> Address:
        """Return this rank's address on a host with these IPv4 addresses."""
        return Address(hosts, self._socket.getsockname()[1])

    def know(self, hosts: list[dict[int, Address]]) -> None:
        """Set the other hosts, each as the addresses of its ranks."""
        self._hosts = hosts


def _answer(listening: socket.socket, closed: threading.Event, token: bytes, page: StatusPage) -> None:
    """Answer every query with the token, until the socket is closed."""
    with listening:
        while True:
            with contextlib.suppress(OSError):  # the asking rank is gone
                question, asker = listening.recvfrom(LARGEST)
                if closed.is_set():
                    return
                if secrets.compare_digest(question[:TOKEN_BYTES], token):
                    if question[TOKEN_BYTES:] == DUMP:
                        _begin_dump(page)
                    for part in packed(page.read()):
                        listening.sendto(token + part, asker)


def _close(listening: socket.socket, closed: threading.Event) -> None:
    closed.set()
    with contextlib.suppress(OSError):  # it raises, as the socket is not connected, but still wakes the thread
        listening.shutdown(socket.SHUT_RD)


def _begin_dump(page: StatusPage) -> None:
    if not page.dump_folder:
        page.dump_folder = folder = new_dump_folder()
        if folder:
            endings.print_line(f"clcomm: on {os.uname().nodename} what each rank did last is in {folder}/rank-*.json")


def packed(lines: Sequence[RankStatus]) -> list[bytes]:
    """Return lines as datagrams, one if they fit, with times relative to now, as the hosts' clocks differ.

    Texts are cut. Each datagram leaves room for the token, and `unpacked` takes it without the others.
    """
    now_ns, room = perf_counter_ns(), min(_MOST_TEXT_BYTES, _MOST_TEXTS_BYTES // (2 * len(lines)))
    most, datagrams = LARGEST - TOKEN_BYTES - len("[]"), list[list[bytes]]()
    left = 0
    for line in lines:
        encoded = _encoded(
            line._replace(
                beat_ns=now_ns - line.beat_ns,
                began_ns=now_ns - line.began_ns,
                text=_cut(line.text, room),
                place=_cut(line.place, room),
            )
        )
        if not datagrams or len(encoded) > left:
            datagrams.append([])
            left = most
        datagrams[-1].append(encoded)
        left -= len(encoded) + len(",")
    return [b"[" + b",".join(each) + b"]" for each in datagrams]


def _cut(text: str, room: int) -> str:
    """Return the longest beginning of a text that takes at most `room` bytes in a datagram, without its quotes."""
    text = text[:room].encode(errors="replace").decode()  # "?" for what UTF-8 cannot encode
    while (excess := len(_encoded(text)) - len('""') - room) > 0:
        dropped = -(-excess // _MOST_CHARACTER_BYTES)
        text = text[:-dropped]
    return text


def _encoded(value: object) -> bytes:
    return json.dumps(value, default=dict, ensure_ascii=False, separators=(",", ":")).encode()


def unpacked(answer: bytes) -> list[RankStatus]:
    """Return the lines of a datagram; none if it is malformed."""
    now_ns = perf_counter_ns()
    try:
        return [
            RankStatus(int(rank), now_ns - int(beat), int(key), now_ns - int(began), bool(dumped), str(state),
                       str(text), str(place), dict(figures))
            for rank, beat, key, began, dumped, state, text, place, figures in json.loads(answer)
        ]  # fmt: skip
    except (ValueError, TypeError, RecursionError):
        return []


def _unknown(rank: int) -> RankStatus:
    return RankStatus(rank, 0, 0, 0, False, UNKNOWN, "", "")


def own_addresses() -> list[str]:
    """Return this host's IPv4 addresses except loopback, in the order of its interfaces."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(any_socket, _INTERFACE_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(reply[20:24]))
    return [address for address in found if not address.startswith("127.")]
