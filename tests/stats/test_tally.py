"""Tallies: sums of drawn calls against whole-number arithmetic, in any grouping."""

from __future__ import annotations

import json

import numpy as np
import pytest

from clcomm.comm.stats.events import Collective
from clcomm.comm.stats.tally import Tally
from tests.stats_events import event


def drawn(seed: int) -> tuple[list[Collective], dict[str, int]]:
    """Return calls whose times are whole nanoseconds, and what they add up to."""
    rng = np.random.default_rng(seed)
    calls, sums = [], dict.fromkeys(("calls", "nbytes", "wire_nbytes", "failures", "ns", "max_ns"), 0)
    sums |= dict.fromkeys(("wait_ns", "wait_unknown_ns", "hidden_ns"), 0)
    for _ in range(rng.integers(0, 60)):
        nbytes, ns = int(rng.integers(0, 1 << 40)), int(10 ** rng.uniform(2, 10.9))
        exposed_ns = None if rng.random() < 0.4 else int(rng.integers(0, ns + 1))
        wait_ns = None if rng.random() < 0.3 else int(rng.integers(0, 2 * ns))  # clocks may disagree
        wire = None if rng.random() < 0.5 else int(rng.integers(0, nbytes + 1))
        failed = bool(rng.random() < 0.15)
        calls.append(event(
            ns * 1e-9, nbytes, failed=failed, wire_nbytes=wire, wait_s=None if wait_ns is None else wait_ns * 1e-9,
            exposed_s=None if exposed_ns is None else exposed_ns * 1e-9,
        ))  # fmt: skip
        if failed:
            sums["failures"] += 1
            continue
        shown_ns = ns if exposed_ns is None else exposed_ns
        sums["calls"] += 1
        sums["nbytes"] += nbytes
        sums["wire_nbytes"] += nbytes if wire is None else wire
        sums["ns"] += ns
        sums["max_ns"] = max(sums["max_ns"], ns)
        sums["hidden_ns"] += ns - shown_ns
        sums["wait_unknown_ns" if wait_ns is None else "wait_ns"] += (
            shown_ns if wait_ns is None else min(shown_ns, wait_ns)
        )
    return calls, sums


def tally_of(calls: list[Collective], transport: str = "solo") -> Tally:
    tally = Tally(transport)
    if calls:
        tally.add(tuple(zip(*calls, strict=True)))
    return tally


@pytest.mark.parametrize("seed", range(100))
def test_sums_are_exact_in_any_grouping_and_survive_json(seed: int) -> None:
    calls, sums = drawn(seed)
    whole = tally_of(calls)
    assert {name: getattr(whole, name) for name in sums} == sums
    assert sum(whole.histogram.counts) == sums["calls"]
    rng = np.random.default_rng(seed)
    parts = [tally_of([calls[i] for i in group]) for group in np.array_split(rng.permutation(len(calls)), 4)]
    merged = Tally()
    for part in parts:
        merged.absorb(Tally.restored(json.loads(json.dumps(part.state()))))
    assert merged.state() == whole.state()
    assert sums["wait_ns"] + sums["wait_unknown_ns"] + sums["hidden_ns"] <= sums["ns"]


@pytest.mark.parametrize(
    ("names", "merged"),
    [
        (("mpi", "shared"), "mpi+shared"),
        (("shared", "mpi+shared"), "mpi+shared"),
        (("", "solo"), "solo"),
        (("", ""), ""),
    ],
)
def test_transports_are_named_once_each(names: tuple[str, str], merged: str) -> None:
    for order in (names, names[::-1]):
        tally = tally_of([], order[0])
        tally.absorb(tally_of([], order[1]))
        assert tally.transport == merged
