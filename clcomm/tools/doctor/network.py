"""The network: named hosts, the speed of messages between the ranks' hosts, and their clocks."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from clcomm.base.console.finding import Finding, note, ok, problem
from clcomm.base.errors import name_ranks
from clcomm.base.units import format_size
from clcomm.tools.doctor.job import Facts, JobFacts

if TYPE_CHECKING:
    from clcomm.comm.transport.mpi_runtime import Intracomm

#: ssh's port, by which launchers start ranks on other hosts, and how long a host may take to answer.
_PORT, _ANSWER_S = 22, 5.0
#: Messages that measure latency and bandwidth, and how often.
_SMALL, _LARGE, _PINGS, _TAG = 8, 4 << 20, 50, 12
#: Messages of _LARGE in a measurement each way, and how much of their bytes a tunnel has to have carried to be theirs.
_LARGE_SENT, _CARRIED = 10, 0.95
_SYSTEM, _SOCKETS = Path("/sys/class/net"), Path("/var/run/wireguard")
#: Beyond this latency, or below this bandwidth, communication takes longer than computing for most models.
SLOW_S, SLOW_BYTES_PER_S = 1e-3, 110e6
#: Offsets in seconds: lines of logs are out of order; files look newer or older than they are.
VISIBLE_S, WRONG_S = 0.1, 2.0
_ROUND_TRIPS, _CLOCK_TAG = 8, 11
_REMEDY = "let every host keep its clock by a time server: timedatectl set-ntp true, or chronyd"


def named_hosts(hosts: str, hostfile: str) -> list[str]:
    """Return the names in --hosts a,b:2 and in a hostfile, without slots and comments; raises OSError."""
    names = [each for each in hosts.split(",") if each]
    if hostfile:
        lines = [line.partition("#")[0].split() for line in Path(hostfile).read_text(errors="replace").splitlines()]
        names += [line[0] for line in lines if line]
    return list(dict.fromkeys(name if name.count(":") > 1 else name.partition(":")[0] for name in names))


def probe(names: list[str]) -> dict[str, object]:
    """Return for each host why it can't be reached, "" where it can: its name is resolved and its ssh is called."""
    with ThreadPoolExecutor(16) as threads:
        return {"reasons": dict(zip(names, threads.map(_unreachable, names), strict=True))}


def _unreachable(name: str) -> str:
    try:
        address = socket.getaddrinfo(name, _PORT, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return f"its name is not known ({error.strerror})"
    try:
        with socket.socket(address[0], address[1]) as calling:
            calling.settimeout(_ANSWER_S)
            calling.connect(address[4])
    except TimeoutError:
        return f"{address[4][0]} does not answer within {_ANSWER_S:g} s"
    except ConnectionRefusedError:
        return f"{address[4][0]} answers, but has no ssh at port {_PORT}"
    except OSError as error:
        return f"{address[4][0]}: {error.strerror}"
    return ""


def measure(world: Intracomm, hosts: list[str]) -> Facts:
    """Return seconds a message and bytes a second between rank 0 and the first rank of each other host; collective.

    Args:
        world: an mpi4py communicator of all ranks.
        hosts: each rank's.
    """
    found: dict[str, object] = {}
    for host in dict.fromkeys(hosts):
        peer = hosts.index(host)
        if host != hosts[0] and world.Get_rank() in (0, peer):
            latency_s = _half_round_trip(world, peer, _SMALL, _PINGS)
            before = sent_nbytes()
            large_s = _half_round_trip(world, peer, _LARGE, _LARGE_SENT - 2)
            sent = {name: nbytes - before.get(name, 0) for name, nbytes in sent_nbytes().items()}
            tunnels = {name: nbytes for name, nbytes in sent.items() if is_wireguard(name)}
            found[host] = {"latency_s": latency_s, "bytes_per_s": _LARGE / max(large_s, 1e-9), "tunnels": tunnels}
    world.barrier()
    return found


def sent_nbytes() -> dict[str, int]:
    """Return what each network interface of this host has sent since it is there; {} where the system does not say."""
    found = {}
    for path in _SYSTEM.glob("*/statistics/tx_bytes"):
        with suppress(OSError, ValueError):  # it has gone
            found[path.parent.parent.name] = int(path.read_text())
    return found


def is_wireguard(name: str) -> bool:
    """Return whether an interface is WireGuard's: the kernel's, or one of a program such as wireguard-go."""
    with suppress(OSError):
        return "DEVTYPE=wireguard" in (_SYSTEM / name / "uevent").read_text() or (
            (_SYSTEM / name / "tun_flags").exists() and (_SOCKETS / f"{name}.sock").exists()
        )
    return False


def _privacy(first: str, host: str, tunnels: dict[str, int]) -> Iterator[Finding]:
    """Judge whether messages went through WireGuard, where a host has an interface of it."""
    names, share = ", ".join(sorted(tunnels)), sum(tunnels.values()) / (_LARGE_SENT * _LARGE)
    if share >= _CARRIED:
        yield ok("privacy", f"{first} to {host}: through {names}, which WireGuard encrypts", sent=tunnels)
    elif tunnels:
        yield problem(
            "privacy", f"{first} to {host}: {1 - share:.0%} of what MPI sent did not go through {names} and was not "
            "encrypted", f"UCX_NET_DEVICES={names} on all hosts (MPICH), or Open MPI's --mca btl_tcp_if_include; "
            "docs/launchers.md", sent=tunnels,
        )  # fmt: skip


def _half_round_trip(world: Intracomm, peer: int, nbytes: int, count: int) -> float:
    """Return half of the median round trip between rank 0 and a peer; both call it."""
    message, times = bytearray(nbytes), []
    for _ in range(count + 2):
        began_s = time.perf_counter()
        if world.Get_rank() == 0:
            world.Send(message, peer, _TAG)
            world.Recv(message, peer, _TAG)
        else:
            world.Recv(message, 0, _TAG)
            world.Send(message, 0, _TAG)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[2:]) / 2


def check(job: JobFacts) -> Iterator[Finding]:
    """Judge the hosts that were named, and the speed between those of the ranks."""
    for facts in list(job.of("hosts").values())[:1]:
        for name, reason in facts["reasons"].items():
            if reason:
                yield problem(
                    "hosts", f"{name} cannot be reached: {reason}",
                    f"check the name (getent hosts {name}), that it runs, its firewall, and ssh {name} true",
                    host=name, reason=reason,
                )  # fmt: skip
            else:
                yield ok("hosts", f"{name} answers", host=name)
    first = next(iter(job.hosts))
    for host, measured in job.ranks[0].get("network", {}).items():
        speed = {name: value for name, value in measured.items() if name != "tunnels"}
        yield from _privacy(first, host, measured["tunnels"])
        latency_s, rate = speed["latency_s"], speed["bytes_per_s"]
        what = f"{first} to {host}: {latency_s * 1e6:,.0f} us a message, {format_size(int(rate))}/s"
        if latency_s > SLOW_S or rate < SLOW_BYTES_PER_S:
            yield note(
                "network", what, "choose the faster interface (UCX_NET_DEVICES, or Open MPI's --mca btl_tcp_if_include)"
                "; or send less: --compression bf16, --grad-accumulation", **speed,
            )  # fmt: skip
        else:
            yield ok("network", what, **speed)


def measure_clocks(world: Intracomm) -> Facts:
    """Return how far this rank's clock is ahead of rank 0's, in seconds, and to what precision; collective.

    Cristian's method, as in clcomm/comm/transport/hosts.py, for the hour instead of the time since a host's start.
    """
    best = (0.0, float("inf"))
    for rank in range(1, world.Get_size()):
        for _ in range(_ROUND_TRIPS):
            if world.Get_rank() == rank:
                began = time.time()
                hour = world.sendrecv(None, 0, _CLOCK_TAG, None, 0, _CLOCK_TAG)
                ended = time.time()
                best = min(best, ((began + ended) / 2 - hour, (ended - began) / 2), key=lambda pair: pair[1])
            elif world.Get_rank() == 0:
                world.recv(None, rank, _CLOCK_TAG)
                world.send(time.time(), rank, _CLOCK_TAG)
    return {"ahead_s": best[0], "precision_s": best[1] if world.Get_rank() else 0.0}


def check_clocks(job: JobFacts) -> Iterator[Finding]:
    """Compare the clocks of all ranks with rank 0's."""
    found = job.of("clocks")
    if len(found) < 2:
        return
    offsets = {rank: facts["ahead_s"] for rank, facts in found.items()}
    off = {rank: ahead for rank, ahead in offsets.items() if abs(ahead) > VISIBLE_S + found[rank]["precision_s"]}
    for rank in sorted(off, key=lambda rank: -abs(off[rank]))[:4]:
        ahead = off[rank]
        side = "ahead of" if ahead > 0 else "behind"
        host = job.ranks[rank]["place"]["host"]
        what = f"{name_ranks([rank])}'s ({host}) is {abs(ahead):,.2f} s {side} rank 0's: "
        if abs(ahead) > WRONG_S:
            yield problem("clocks", what + "files look newer than they are", _REMEDY, offsets=offsets)
        else:
            yield note("clocks", what + "lines of logs are out of order", _REMEDY, offsets=offsets)
    if not off:
        most = max(abs(ahead) for ahead in offsets.values())
        yield ok("clocks", f"equal to within {max(most, 1e-6) * 1e3:.2g} ms", offsets=offsets)
