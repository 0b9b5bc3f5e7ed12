"""What the ranks of other hosts are doing: asked over the network, and only when something stalls.

Each rank has a thread that waits for such questions and answers with what its host's board says. No main thread and no
MPI takes part, so an answer comes whatever the ranks are in; one rank that can answer is enough for its host.
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
from collections.abc import Sequence
from time import monotonic, perf_counter_ns
from typing import Any, NamedTuple

from clcomm import job
from clcomm.flight_recorder import new_dump_folder
from clcomm.progress import Progress, ProgressBoard
from clcomm.stall import UNKNOWN

#: What is asked: what the ranks of your host are doing; the same, and let them write down what they did last.
PROGRESS, DUMP = b"?", b"!"
#: How long one rank of a host is waited for until the next one is asked too, and how long to ask in all.
NEXT_S, ASK_S = 0.2, 2.0
TOKEN_BYTES, LARGEST = 16, 65_507
#: How many bytes of a text an answer holds, and of all its texts together.
_TEXT, _TEXTS = 600, 40_000
_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR of netdevice(7)


class Address(NamedTuple):
    """Where a rank can be asked: its host's IPv4 addresses, of which some can be reached, and its port."""

    hosts: list[str]
    port: int


class OtherHosts:
    """The ranks of other hosts, and this rank's thread that answers them.

    board: this host's. token: a secret of the job; who does not know it gets no answer.
    """

    def __init__(self, board: ProgressBoard, token: bytes):
        self._token, self._hosts = token, list[dict[int, Address]]()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        closed = threading.Event()
        threading.Thread(
            target=_answer, args=(self._socket, closed, token, board), name="clcomm-answers", daemon=True
        ).start()
        self.close = weakref.finalize(self, _close, self._socket, closed)
        self.close.atexit = False

    @classmethod
    def of(cls, comm: Any, hosts: Sequence[Sequence[int]], board: ProgressBoard) -> OtherHosts:
        """Return the hosts, given as ranks, but for the board's own. Collective."""
        made = cls(board, comm.bcast(secrets.token_bytes(TOKEN_BYTES), 0))
        addresses = comm.allgather(made.address(own_addresses()))
        made.know([{rank: addresses[rank] for rank in ranks} for ranks in hosts if board.own not in ranks])
        return made

    def address(self, hosts: list[str]) -> Address:
        """Return where this rank can be asked, on a host with these addresses."""
        return Address(hosts, self._socket.getsockname()[1])

    def know(self, hosts: list[dict[int, Address]]) -> None:
        """Learn of the other hosts: each one's ranks, and where they can be asked."""
        self._hosts = hosts

    def ask(self, question: bytes = PROGRESS) -> list[Progress]:
        """Return the lines of all ranks of other hosts, in the order of ranks, within some seconds.

        Those of a host on which nobody answers have the state UNKNOWN.
        """
        found: dict[int, Progress] = {}
        silent = self._hosts
        deadline, attempt = monotonic() + ASK_S, 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            while silent and monotonic() < deadline:
                for host in silent:
                    self._send(asking, [*host.values()][attempt % len(host)], question)
                found |= self._answers(asking, min(deadline, monotonic() + NEXT_S), silent)
                silent = [host for host in silent if not host.keys() <= found.keys()]
                attempt += 1
        return [found.get(rank) or _unknown(rank) for rank in sorted(rank for host in self._hosts for rank in host)]

    def _send(self, asking: socket.socket, address: Address, question: bytes) -> None:
        for host in address.hosts:
            with contextlib.suppress(OSError):  # no way to that address
                asking.sendto(self._token + question, (host, address.port))

    def _answers(
        self, asking: socket.socket, deadline: float, silent: Sequence[dict[int, Address]]
    ) -> dict[int, Progress]:
        """Return what comes in until then, or until all these hosts have answered."""
        wanted, found = {rank for host in silent for rank in host}, dict[int, Progress]()
        while not wanted <= found.keys() and (left_s := deadline - monotonic()) > 0:
            asking.settimeout(left_s)
            with contextlib.suppress(OSError):  # nothing came
                answer = asking.recv(LARGEST)
                if secrets.compare_digest(answer[:TOKEN_BYTES], self._token):
                    found |= {line.rank: line for line in unpacked(answer[TOKEN_BYTES:]) if line.rank in wanted}
        return found


def _answer(listening: socket.socket, closed: threading.Event, token: bytes, board: ProgressBoard) -> None:
    """Answer every question that knows the token, until the socket is closed."""
    with listening:
        while True:
            with contextlib.suppress(OSError):  # who asked is gone
                question, asker = listening.recvfrom(LARGEST)
                if closed.is_set():
                    return
                if secrets.compare_digest(question[:TOKEN_BYTES], token):
                    if question[TOKEN_BYTES:] == DUMP:
                        _begin_dump(board)
                    listening.sendto(token + packed(board.read()), asker)


def _close(listening: socket.socket, closed: threading.Event) -> None:
    closed.set()
    with contextlib.suppress(OSError):  # it was connected to nobody; the thread wakes all the same
        listening.shutdown(socket.SHUT_RD)


def _begin_dump(board: ProgressBoard) -> None:
    if not board.dump_folder:
        board.dump_folder = folder = new_dump_folder()
        if folder:
            job.print_line(f"clcomm: on {os.uname().nodename} what each rank did last is in {folder}/rank-*.json")


def packed(lines: Sequence[Progress]) -> bytes:
    """Return lines as a datagram that another host understands, whose clock is another."""
    now_ns, room = perf_counter_ns(), min(_TEXT, _TEXTS // (2 * len(lines)))

    def cut(text: str) -> str:
        return text.encode()[:room].decode(errors="ignore")

    told = [
        line._replace(
            beat_ns=now_ns - line.beat_ns, began_ns=now_ns - line.began_ns, text=cut(line.text), place=cut(line.place)
        )
        for line in lines
    ]
    return json.dumps(told, ensure_ascii=False).encode()


def unpacked(answer: bytes) -> list[Progress]:
    """Return the lines of a datagram; none for one that is not understood."""
    now_ns = perf_counter_ns()
    try:
        return [
            Progress(int(rank), now_ns - int(beat), int(key), now_ns - int(began), bool(dumped), str(state), str(text),
                     str(place))
            for rank, beat, key, began, dumped, state, text, place in json.loads(answer)
        ]  # fmt: skip
    except (ValueError, TypeError, RecursionError):
        return []


def _unknown(rank: int) -> Progress:
    return Progress(rank, 0, 0, 0, False, UNKNOWN, "", "")


def own_addresses() -> list[str]:
    """Return this host's IPv4 addresses by which others may reach it, in the order of its interfaces."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                told = fcntl.ioctl(any_socket, _INTERFACE_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(told[20:24]))
    return [address for address in found if not address.startswith("127.")]
