"""Collectives on objects: every kind of object, from and to every rank, and what is refused on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from tests.helpers import Recorder, one_line


def objects_of(rank: int) -> list[Any]:
    """Return objects that differ by rank: scalars, containers, arrays, and bytes of all sizes."""
    rng = np.random.default_rng(rank)
    return [
        None, rank, -1.5 * rank, f"rank {rank} é\n", {"rank": [rank, {rank}]}, (), [], ArgumentError(f"of {rank}"),
        np.int64(rank), np.array(rank), rng.standard_normal((rank + 1, 3)), np.zeros(0, "complex64"),
        np.array([None, rank, "x"], object), np.array([(rank, 2.0)], [("a", "i4"), ("b", "f8")]),
        *(rng.bytes(length) for length in (0, 1, 1000, 70_000, 1 << 20)),
    ]  # fmt: skip


def same(got: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return isinstance(got, np.ndarray) and got.dtype == expected.dtype and np.array_equal(got, expected)
    if isinstance(expected, Exception):
        return type(got) is type(expected) and str(got) == str(expected)
    return type(got) is type(expected) and got == expected


def test_every_kind_of_object_from_every_root(comm):
    for number, own in enumerate(objects_of(comm.rank)):
        everyone = [objects_of(rank)[number] for rank in range(comm.size)]
        assert all(map(same, comm.all_gather_object(own), everyone))
        for root in range(comm.size):
            assert same(comm.broadcast_object(own, root), everyone[root])
            gathered = comm.gather_object(own, root)
            assert (gathered is None) == (comm.rank != root)
            assert gathered is None or all(map(same, gathered, everyone))
            assert same(comm.scatter_object(everyone if comm.rank == root else None, root), own)


def test_items_to_scatter_may_be_any_sequence(comm):
    for items in ([*range(comm.size)], tuple(range(comm.size)), range(comm.size), "abcdefgh"[: comm.size]):
        assert comm.scatter_object(items) == items[comm.rank]


@pytest.mark.parametrize(("items", "reason"), [(-1, "one for each rank, got"), (1, "one for each rank, got"),
                                               (None, "got NoneType"), (3, "got int")])  # fmt: skip
def test_items_that_do_not_fit_are_the_same_error_on_every_rank(comm, items, reason):
    """What other ranks pass does not count, and the next collective is not disturbed."""
    wrong = items if items not in (-1, 1) else [None] * (comm.size + items)
    for root in range(comm.size):
        with pytest.raises(ArgumentError) as caught:
            comm.scatter_object(wrong if comm.rank == root else [None] * comm.size, root)
        message = one_line(caught)
        assert message.startswith("items: expected ") and reason in message and message.endswith(f"on rank {root}")
        assert comm.all_gather_object(message) == [message] * comm.size


def test_each_is_counted_once_under_its_own_name(comm):
    watcher = Recorder()
    comm.add_observer(watcher)
    comm.broadcast_object("x", label="a")
    comm.all_gather_object("x", label="b")
    comm.gather_object("x", label="c")
    comm.scatter_object(["x"] * comm.size, label="d")
    kinds = [(event.operation, event.label, event.nbytes, event.failed) for event in watcher.events]
    names = ("broadcast_object", "all_gather_object", "gather_object", "scatter_object")
    assert kinds == [(name, label, 0, False) for name, label in zip(names, "abcd", strict=True)]
    first = watcher.events[0].sequence
    assert [event.sequence for event in watcher.events] == [first, first + 1, first + 2, first + 3]
