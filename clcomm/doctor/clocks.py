"""Clocks: the hour on each host, by messages between ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from clcomm.doctor.finding import Finding, note, ok, problem
from clcomm.doctor.job import Job
from clcomm.errors import name_ranks

#: Offsets in seconds: lines of logs are out of order; files look newer or older than they are.
VISIBLE_S, WRONG_S = 0.1, 2.0
_ROUND_TRIPS, _TAG = 8, 11
_REMEDY = "let every host keep its clock by a time server: timedatectl set-ntp true, or chronyd"


def measure(world: Any) -> dict[str, Any]:
    """Return how far this rank's clock is ahead of rank 0's, in seconds, and to what precision; collective.

    Cristian's method, as in clcomm/transport/clock.py, for the hour instead of the time since a host's start.
    """
    best = (0.0, float("inf"))
    for rank in range(1, world.Get_size()):
        for _ in range(_ROUND_TRIPS):
            if world.Get_rank() == rank:
                began = time.time()
                hour = world.sendrecv(None, 0, _TAG, None, 0, _TAG)
                ended = time.time()
                best = min(best, ((began + ended) / 2 - hour, (ended - began) / 2), key=lambda pair: pair[1])
            elif world.Get_rank() == 0:
                world.recv(None, rank, _TAG)
                world.send(time.time(), rank, _TAG)
    return {"ahead_s": best[0], "precision_s": best[1] if world.Get_rank() else 0.0}


def check(job: Job) -> Iterator[Finding]:
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
