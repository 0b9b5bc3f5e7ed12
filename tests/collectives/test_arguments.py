"""Refused arguments: word by word, and on every rank."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError, MismatchError
from tests.helpers import one_line


def test_what_cannot_be_reduced(comm):
    floats = np.zeros((2, 3), np.float32)
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    ops = "op: expected one of sum, mean, min, max, prod, land, lor, lxor, band, bor, bxor, got"
    like = "out: expected shape (2, 3) and dtype float32 as array has, got"
    cases = [
        ((floats, "avg"), {}, f"{ops} 'avg'"),
        ((floats, None), {}, f"{ops} None"),
        ((floats, ["sum"]), {}, f"{ops} ['sum']"),
        (([1.0],), {}, "array: expected a NumPy array, got list"),
        ((3.0,), {}, "array: expected a NumPy array, got float"),
        ((np.array(["a"]),), {}, "array: expected numbers to reduce, got dtype <U1"),
        ((np.array([None]),), {}, "array: expected numbers to reduce, got dtype object"),
        ((np.zeros(2, "M8[s]"),), {}, "array: expected numbers to reduce, got dtype datetime64[s]"),
        ((np.zeros(2, np.int32), "mean"), {}, "op: 'mean' needs a floating dtype, got int32; use 'sum'"),
        ((read_only,), {}, "array: expected a writable array, got a read-only one"),
        ((np.zeros(3),), {"out": read_only}, "out: expected a writable array, got a read-only one"),
        ((floats,), {"out": [0]}, "out: expected a NumPy array, got list"),
        ((floats,), {"out": np.zeros((3, 2), np.float32)}, f"{like} (3, 2) and float32"),
        ((floats,), {"out": np.zeros((2, 3))}, f"{like} (2, 3) and float64"),
    ]
    for reduce in (comm.all_reduce, comm.all_reduce_async):
        for args, kwargs, message in cases:
            with pytest.raises(ArgumentError) as caught:
                reduce(*args, **kwargs)
            assert one_line(caught) == message
    comm.barrier()  # the ranks still work together


def test_memory_that_overlaps_itself(comm):
    for memory in (np.zeros(20, np.float32), comm.allocate(80).view(np.float32)):
        with pytest.raises(ArgumentError) as caught:
            comm.all_reduce(memory[:10], out=memory[5:15])
        assert one_line(caught) == "out: expected array itself or separate memory, got memory that overlaps it"
        memory[:] = 1
        assert (comm.all_reduce(memory[:10], out=memory[:10]) == comm.size).all()
        assert (comm.all_reduce(memory[10:], out=memory[:10]) == comm.size).all()


@pytest.mark.mpi(min_size=2)
def test_common_memory_is_no_contribution(auto):
    common = auto.allocate_common(64)
    with pytest.raises(ArgumentError) as caught:
        auto.all_reduce(common)
    assert one_line(caught) == "array: expected memory of this rank, got memory that is common to all ranks"


def test_roots_that_are_no_rank(comm):
    calls = [
        lambda root: comm.broadcast(np.zeros(2), root),
        lambda root: comm.gather(np.zeros(2), root),
        lambda root: comm.scatter(np.zeros(comm.size), root),
        lambda root: comm.broadcast_object(1, root),
        lambda root: comm.gather_object(1, root),
        lambda root: comm.scatter_object([1] * comm.size, root),
    ]
    for call in calls:
        for root in (-1, comm.size, "0", None, 0.0):
            with pytest.raises(ArgumentError) as caught:
                call(root)
            assert one_line(caught) == f"root: expected a rank from 0 to {comm.size - 1}, got {root!r}"


def test_what_other_collectives_refuse(comm):
    for call in (comm.broadcast, comm.all_gather):
        with pytest.raises(ArgumentError, match=r"^array: expected a NumPy array, got list$"):
            call([1])
        with pytest.raises(
            ArgumentError, match=r"^array: expected numbers, got dtype object; use the object variants$"
        ):
            call(np.array([None]))
    with pytest.raises(ArgumentError, match=r"^op: expected one of"):
        comm.reduce_scatter(np.zeros(comm.size), "product")
    with pytest.raises(ArgumentError, match=rf"^array: expected a first dimension that {comm.size} ranks divide, got"):
        comm.reduce_scatter(np.zeros(()))


@pytest.mark.mpi(min_size=2)
def test_blocks_that_do_not_come_out_even(auto):
    with pytest.raises(ArgumentError) as caught:
        auto.reduce_scatter(np.zeros((auto.size + 1, 2)))
    assert one_line(caught) == (
        f"array: expected a first dimension that {auto.size} ranks divide, got shape ({auto.size + 1}, 2)"
    )


def test_a_scatter_of_too_few_is_refused_on_every_rank(comm):
    for root in range(comm.size):
        for items in ([0] * (comm.size + 1), np.zeros(comm.size + 1), []):
            for call, name in ((comm.scatter, "data"), (comm.scatter_object, "items")):
                with pytest.raises(ArgumentError) as caught:
                    call(items if comm.rank == root else None, root)
                assert one_line(caught) == (
                    f"{name}: expected {comm.size} items, one for each rank, got {len(items)} on rank {root}"
                )
        for call, name in ((comm.scatter, "data"), (comm.scatter_object, "items")):
            with pytest.raises(ArgumentError) as caught:
                call(5 if comm.rank == root else None, root)
            assert one_line(caught) == f"{name}: expected a sequence of {comm.size} items, got int on rank {root}"


@pytest.mark.parametrize("call", ["allocate", "allocate_common"])
def test_sizes_that_cannot_be_allocated(comm, call):
    for nbytes in (0, -1, "abc", 1.5):
        with pytest.raises(ArgumentError) as caught:
            getattr(comm, call)(nbytes)
        assert one_line(caught).startswith("nbytes: expected a positive number of bytes")
    assert getattr(comm, call)("1KiB").shape == (1024,)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["allocate", "allocate_common"])
def test_sizes_that_differ_are_the_same_error_on_every_rank(auto, call):
    last = auto.size - 1
    with pytest.raises(MismatchError) as caught:
        getattr(auto, call)(200 if auto.rank == last else 100)
    message = one_line(caught)
    assert message == f"nbytes: expected the same on every rank, got 100 on rank 0, 200 on rank {last}"
    assert set(auto.all_gather_object(message)) == {message}
    with pytest.raises(ArgumentError, match=r"^nbytes: expected a positive number"):
        getattr(auto, call)(0 if auto.rank == last else 100)  # wrong on one rank alone
    assert getattr(auto, call)(100).shape == (100,)


def test_what_is_no_communicator_is_refused():
    for value, got in ((3.0, "float"), ("world", "str"), (object(), "object")):
        with pytest.raises(ArgumentError) as caught:
            Communicator(value)
        assert one_line(caught) == f"comm: expected an mpi4py intracommunicator such as MPI.COMM_WORLD, got {got}"


def test_mpis_null_communicator_is_refused():
    from mpi4py import MPI

    with pytest.raises(ArgumentError, match=r"^comm: .* got COMM_NULL$"):
        Communicator(MPI.COMM_NULL)


@pytest.mark.parametrize("given", [0, -1, "abc", "", None, 1.5])
def test_bucket_sizes_that_are_none(given):
    with pytest.raises(ArgumentError) as caught:
        Communicator(bucket_size=given)
    assert one_line(caught) == (
        f"bucket_size: expected a positive number of bytes such as 1048576, '1MiB' or '256KiB', got {given!r}"
    )


@pytest.mark.parametrize("given", ["nccl", None, ["mpi"]])
def test_transports_that_there_are_not(given):
    with pytest.raises(ArgumentError) as caught:
        Communicator(transport=given)
    assert one_line(caught) == f"transport: expected one of auto, shared, mpi, solo, got {given!r}"


def overlapping(kind: str, dtype: str) -> np.ndarray:
    """Return a writable array of which elements lie on one another."""
    base = np.zeros(64, dtype)
    shape, strides = {
        "one element": ((6,), (0,)), "rows": ((4, 3), (0, 1)), "columns": ((4, 3), (1, 0)), "windows": ((5, 4), (2, 1)),
        "backwards": ((4, 3), (-2, 1)), "halves": ((6,), (0.5,)), "a batch": ((2, 3, 4), (4, 4, 1)),
    }[kind]  # fmt: skip
    steps = tuple(int(each * base.itemsize) for each in strides)
    return np.lib.stride_tricks.as_strided(base[16:], shape, steps)


@pytest.mark.parametrize("kind", ["one element", "rows", "columns", "windows", "backwards", "halves", "a batch"])
def test_results_with_common_elements_are_refused(comm, kind):
    array = overlapping(kind, "float32")
    plain = np.ones(array.shape, np.float32)
    for collective in (
        lambda: comm.all_reduce(array), lambda: comm.all_reduce(plain, out=array), lambda: comm.broadcast(array),
        lambda: comm.all_reduce(array, algorithm="ring"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            collective()
        assert "expected elements with memory of their own" in one_line(caught)
        assert f"strides {array.strides}" in one_line(caught)
    for parts in (plain[::-1], plain.T, plain[..., ::2], plain.reshape(-1)[::-3]):
        apart = parts.copy()
        expected = apart * comm.size
        assert (comm.all_reduce(parts.copy(), out=parts) == expected).all()  # strides alone are no overlap
        plain[...] = 1


def test_results_in_memory_that_is_sent_are_right_or_refused(comm):
    base = np.zeros(8 * comm.size + 8, np.float32)
    for collective in (
        lambda: comm.all_reduce(base[:8], out=base[1:9]),
        lambda: comm.all_to_all([base[:4]] * comm.size, [base[3 + 4 * each :][:4] for each in range(comm.size)]),
        lambda: comm.all_to_all([np.zeros(4, np.float32)] * comm.size, [base[each:][:4] for each in range(comm.size)])
        if comm.size > 1 else comm.all_to_all([base[:4]], [base[:4]]),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            collective()
        assert "overlap" in one_line(caught)
    for shift in (0, 1, 3):
        own = base[4 * comm.rank + shift :][:4]
        own[...] = comm.rank + 1
        gathered = comm.all_gather(own, out=base[: 4 * comm.size])
        assert (gathered.reshape(comm.size, 4) == np.arange(1, comm.size + 1)[:, None]).all()
        own[...] = comm.rank + 1
        gathered = comm.all_gather_async(own, out=base[: 4 * comm.size]).wait()
        assert (gathered.reshape(comm.size, 4) == np.arange(1, comm.size + 1)[:, None]).all()
        base[: 4 * comm.size] = np.arange(4 * comm.size)
        summed = comm.reduce_scatter(base[: 4 * comm.size], out=base[4 * comm.rank + shift :][:4])
        assert (summed == comm.size * np.arange(4 * comm.rank, 4 * comm.rank + 4)).all()


class Quantity(np.ndarray):
    """Numbers with a unit, which a collective would drop."""

    def __array_finalize__(self, other):
        self.unit = getattr(other, "unit", "")


class Named(np.ndarray):
    """Numbers alone."""


@pytest.mark.parametrize("lost", ["mask", "state of a Quantity"])
def test_arrays_with_more_than_numbers_are_refused_or_come_whole(comm, lost):
    plain, shape = np.ones((comm.size, 2), np.float32), (comm.size, 2)
    comm.all_reduce(plain)  # a plan of the same memory is no way around
    array = np.ma.MaskedArray(plain, mask=np.eye(*shape), copy=False) if lost == "mask" else plain.view(Quantity)
    for collective in (
        lambda: comm.all_reduce(array), lambda: comm.all_reduce(np.ones(shape, np.float32), out=array),
        lambda: comm.all_reduce_async(array), lambda: comm.all_reduce_init(array), lambda: comm.broadcast(array),
        lambda: comm.all_gather(array), lambda: comm.reduce_scatter(array), lambda: comm.all_gather_in_place(array),
        lambda: comm.all_to_all([*array], [*array.copy()]),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            collective()
        assert f"expected a plain array, got one whose {lost} would be lost" in one_line(caught)
    if lost == "mask":
        gathered = comm.gather(array)
        for each in gathered or ():
            assert (np.ma.getmaskarray(each) == np.eye(*shape)).all()
        assert (np.ma.getmaskarray(comm.broadcast_object(array)) == np.eye(*shape)).all()


@pytest.mark.parametrize("kind", [np.matrix, np.recarray, Named])
def test_other_kinds_of_arrays_are_their_numbers(comm, kind):
    array = np.full((2, 2), comm.rank, np.float32).view(kind)
    assert (np.asarray(comm.all_reduce(array)) == comm.size * (comm.size - 1) / 2).all() and type(array) is kind
