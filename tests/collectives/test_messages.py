"""Messages between two ranks: every dtype, shape and length, order and tags, waits of both sides, and mistakes."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.base.host.arrays import BFLOAT16, to_bfloat16
from tests.helpers import Recorder, one_line

DTYPES = ("bool", "int8", "uint16", "int64", "float16", "float32", ">f4", "complex128")
SHAPES = ((), (0,), (3, 0), (7,), (2, 3, 4), (70_001,))


def drawn(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = np.random.default_rng(rank + 31 * len(shape)).integers(0, 100, shape)
    return np.asarray(values).astype(dtype)


def neighbours(comm) -> tuple[int, int]:
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_given", [True, False], ids=["out", "new"])
def test_every_dtype_and_shape_goes_around_the_ring(comm, dtype, is_given):
    before, after = neighbours(comm)
    for shape in SHAPES:
        out = np.full(shape, 1, dtype) if is_given else None
        found = comm.sendrecv(drawn(comm.rank, shape, dtype), after, 5, out, before, 5)
        expected = drawn(before, shape, dtype)
        assert out is None or found is out
        assert found.dtype == expected.dtype and found.shape == shape and np.array_equal(found, expected)


def test_bfloat16_and_scalars(comm):
    before, after = neighbours(comm)
    halves = comm.sendrecv(to_bfloat16(np.arange(5, dtype=np.float32) + comm.rank), after, source=before)
    expected = to_bfloat16(np.arange(5, dtype=np.float32) + before)
    assert halves.dtype == BFLOAT16 and (halves.view(np.uint16) == expected.view(np.uint16)).all()
    scalar = comm.sendrecv(np.float32(comm.rank), after, source=before)
    assert scalar.shape == () and scalar.dtype == np.float32 and scalar == before


def test_strided_arrays_are_sent_and_received_where_they_lie(comm):
    before, after = neighbours(comm)
    field = np.zeros((6, 5))
    field[:, 1] = np.arange(6) + 10 * comm.rank
    comm.sendrecv(field[:, 1], after, 0, field[:, 0], before)
    expected = np.zeros((6, 5))
    expected[:, 0], expected[:, 1] = np.arange(6) + 10 * before, np.arange(6) + 10 * comm.rank
    assert np.array_equal(field, expected)
    turned = np.zeros(6)
    comm.sendrecv(np.arange(6.0), after, 0, turned[::-1], before)
    assert np.array_equal(turned, np.arange(6.0)[::-1])


@pytest.mark.parametrize("length", [3, 5000])
def test_messages_of_one_tag_keep_their_order_and_tags_set_them_apart(comm, length):
    """Received in another order than sent, from a rank or from any, short ones and long ones."""
    before, after = neighbours(comm)
    sent = [comm.isend(np.full(length, 100.0 * tag + number), after, tag) for number in range(4) for tag in (0, 7, 1)]
    received = {tag: [comm.irecv(None, (before, "any")[number % 2], tag) for number in range(4)] for tag in (7, 1, 0)}
    for tag, handles in received.items():
        for number in (2, 0, 3, 1):
            assert (handles[number].wait() == 100.0 * tag + number).all() and handles[number].source == before
    assert [handle.wait() for handle in sent] == [None] * 12
    comm.barrier()


def test_long_messages_move_while_ranks_are_in_collectives(comm):
    """A receiver that is in a collective goes on receiving, else the sender would wait for it forever."""
    before, after = neighbours(comm)
    received = comm.irecv(np.empty(300_000), before)
    if comm.rank == 0:
        sent = comm.isend(np.arange(300_000.0), after)
        sent.wait() if comm.size > 1 else None
        comm.barrier()
    else:
        comm.barrier()
        sent = comm.isend(np.arange(300_000.0), after)
    assert np.array_equal(received.wait(), np.arange(300_000.0))
    sent.wait()


def test_nobody_gets_and_sends_nothing(comm):
    out = np.ones(3)
    assert comm.sendrecv(np.zeros(3), None, 0, out, None) is out and (out == 1).all()
    assert comm.recv(None, None) is None
    handle = comm.isend(np.zeros(3), None)
    assert handle.done() and handle.source == -1 and comm.stats.total("send")["calls"] == 0


def test_messages_are_counted(comm):
    recorder = Recorder()
    comm.add_observer(recorder)
    before, after = neighbours(comm)
    comm.sendrecv(np.ones((3, 4), np.float32), after, source=before, label="halo")
    comm.sendrecv(np.ones(2), after, 0, np.empty(2), before)
    events = sorted((each.operation, each.label, each.nbytes, each.shape, each.dtype) for each in recorder.events)
    assert events == [(name, *rest) for name in ("recv", "send")
                      for rest in (("", 16, (2,), "float64"), ("halo", 48, (3, 4), "float32"))]  # fmt: skip
    assert all(each.transport == comm.world.base.name and not each.failed for each in recorder.events)
    assert comm.stats.total("recv", "halo")["bytes"] == 48
    comm.remove_observer(recorder)


#: What is sent, and what is expected.
OTHERS = {
    "dtype": (np.ones(6), np.zeros(6, np.float32)),
    "shape": (np.ones((2, 3)), np.zeros((3, 2))),
    "length": (np.ones(5), np.zeros(6)),
    "byte order": (np.ones(6, ">f4"), np.zeros(6, "<f4")),
    "long": (np.ones(40_000), np.zeros(40_001)),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("source", ["rank", "any"])
def test_a_message_of_another_kind_names_its_sender(comm, kind, source):
    """It is not read, and the next one arrives; the sender of a long one raises too, if it is another rank."""
    before, after = neighbours(comm)
    sent, out = OTHERS[kind][0], OTHERS[kind][1].copy()
    handles = [comm.isend(sent, after, 3), comm.isend(out + 2, after, 3)]
    with pytest.raises(MismatchError) as caught:
        comm.recv(out, before if source == "rank" else "any", 3)
    found = one_line(caught)
    assert f"got {sent.dtype} {list(sent.shape)} from rank {before}" in found
    assert f"expected {out.dtype} {list(out.shape)}" in found
    assert not out.any() and (comm.recv(out, before, 3) == 2).all()
    if kind == "long" and comm.world.comm is not None:
        with pytest.raises(MismatchError) as caught:
            handles.pop(0).wait()
        expected = f"recv: expected float64 [40001] on rank {after}, got float64 [40000] from rank {comm.rank}; "
        assert one_line(caught).startswith(expected)
    [handle.wait() for handle in handles]


def test_mistakes_are_one_line(comm):
    x = np.ones(3)
    read_only = x.copy()
    read_only.flags.writeable = False
    for call, text in {
        lambda: comm.send(x, comm.size): f"dest: expected a rank from 0 to {comm.size - 1}, or None",
        lambda: comm.send(x, "any"): "dest: expected a rank",
        lambda: comm.recv(x, 1.5): f'source: expected a rank from 0 to {comm.size - 1}, None for nobody, or "any"',
        lambda: comm.send(x, 0, -1): "tag: expected 0 to",
        lambda: comm.recv(x, 0, 1 << 40): "tag: expected 0 to",
        lambda: comm.send([1.0], 0): "array: expected a NumPy array, got list",
        lambda: comm.send(np.array([object()]), 0): "array: expected numbers, got dtype object",
        lambda: comm.send(np.zeros(2, [("a", "i4"), ("b", "f8")]), 0): "array: expected numbers of one dtype",
        lambda: comm.recv(np.float32(1), 0): "out: expected a writable array",
        lambda: comm.recv(read_only, 0): "out: expected a writable array",
        lambda: comm.recv([1.0], 0): "out: expected a NumPy array, got list",
        lambda: comm.sendrecv(x[:2], None, 0, x[1:], None): "out: expected separate memory",
    }.items():
        with pytest.raises(ArgumentError) as caught:
            call()
        assert one_line(caught).startswith(text)


def test_a_rank_alone_does_not_wait_for_itself():
    with Communicator(transport="solo") as comm:
        with pytest.raises(ArgumentError, match="no other rank can send it"):
            comm.recv(np.ones(2), 0)
        comm.send(np.ones(2), 0)  # what was to be received is received


@pytest.mark.mpi(min_size=1)
def test_finalize_refuses_messages_on_their_way_on_every_rank():
    comm = Communicator()
    handle = comm.irecv(np.empty(2), (comm.rank + 1) % comm.size) if comm.rank == comm.size - 1 else None
    with pytest.raises(ArgumentError) as caught:
        comm.finalize()
    assert "finalize: expected messages that are complete, got 1 that are not, the first recv from rank 0" in one_line(
        caught
    )
    if comm.rank == 0:
        comm.send(np.ones(2), comm.size - 1)
    assert handle is None or (handle.wait() == 1).all()
    comm.finalize()


@pytest.mark.mpi(min_size=2)
def test_mpi4py_constants_and_parts(comm):
    from mpi4py import MPI

    assert comm.recv(None, MPI.PROC_NULL) is None
    before, after = neighbours(comm)
    assert comm.sendrecv(np.array(comm.rank), after, source=MPI.ANY_SOURCE) == before
    with pytest.raises(ArgumentError, match="tag: expected 0 to"):
        comm.recv(None, before, MPI.ANY_TAG)
    part = comm.split(0, -comm.rank, name="turned")
    assert part.sendrecv(np.array(comm.rank), (part.rank + 1) % part.size, source=(part.rank - 1) % part.size) == after
    with pytest.raises(MismatchError, match="recv: expected float64") as caught:
        part.sendrecv(np.ones(2), part.rank, 0, np.ones(3), part.rank)
    assert f"from rank {part.rank}" in one_line(caught)
