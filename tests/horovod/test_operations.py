"""Every operation x dtype x shape x way of calling it, compared as bits with the ranks' tensors by formula."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
MPI = pytest.importorskip("mpi4py.MPI", reason="no MPI library", exc_type=ImportError)

from clcomm.base.errors import ArgumentError  # noqa: E402
from tests.helpers import one_line  # noqa: E402
from tests.horovod.values import FLOATS, INTEGERS, SHAPES, folded, same_bits, spread, tensor_of  # noqa: E402
from tests.sync.adaptive_sum import adaptive_sum  # noqa: E402
from tests.test_gradient_path import FILES, WAITING, traced  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)
OPS = ("Average", "Sum", "Min", "Max", "Product")
LAYOUTS = ("plain", "transposed", "strided")


def ways(hvd):
    """Return the ways to reduce a tensor; each returns the result, and whether the operand must stay as it was."""
    return {
        "blocking": (lambda x, op: hvd.allreduce(x, op=op, name="x"), True),
        "in place": (lambda x, op: hvd.allreduce_(x, op=op), False),
        "async": (lambda x, op: hvd.synchronize(hvd.allreduce_async(x, op=op)), True),
        "async in place": (lambda x, op: hvd.synchronize(hvd.allreduce_async_(x, op=op)), False),
        "grouped": (lambda x, op: hvd.grouped_allreduce([x, x], op=op)[1], True),
        "grouped in place": (lambda x, op: hvd.grouped_allreduce_([x, torch.ones(3)], op=op)[0], False),
    }


@pytest.mark.sampled(15)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool, torch.complex64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_reduces_are_folds_in_rank_order(hvd, dtype, layout):
    names = list(ways(hvd))
    turn = LAYOUTS.index(layout) + len(str(dtype))
    for number, (shape, op) in enumerate((s, o) for s in SHAPES for o in OPS):
        way = names[(number + turn) % len(names)]
        if dtype.is_complex and op in ("Min", "Max", "Product"):
            continue  # NumPy's complex product rounds in one of two ways, by the length of the array
        if dtype == torch.bool and op == "Average":
            continue
        everyone = [tensor_of(rank, shape, dtype, number) for rank in range(hvd.size())]
        own = spread(everyone[hvd.rank()].clone(), layout)
        call, keeps = ways(hvd)[way]
        found = call(own, getattr(hvd, op))
        assert same_bits(found, folded(everyone, op)), (shape, op, way)
        assert same_bits(own, everyone[hvd.rank()] if keeps else found), (shape, op, way)


@pytest.mark.mpi(min_size=2)
def test_an_all_reduce_crosses_few_files(hvd):
    tensor = torch.ones(1000)
    crossed = [set(traced(lambda: hvd.allreduce(tensor)).files) - WAITING for _ in range(5)]
    assert min(map(len, crossed)) == FILES["hvd.allreduce"]  # the first ones get memory


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
@pytest.mark.parametrize(("before", "after"), [(0.5, 1.0), (1.0, 3.0), (2.0, 0.25)])
def test_scales_come_before_and_after_the_sum(hvd, dtype, before, after):
    everyone = [tensor_of(rank, (5, 3), dtype) for rank in range(hvd.size())]
    scale = (lambda x, f: (x.double() * f).trunc().to(dtype)) if dtype == torch.int32 else (lambda x, f: x * f)
    expected = scale(folded([scale(each, before) for each in everyone], "Sum"), after)
    factors = {"prescale_factor": before, "postscale_factor": after}
    assert same_bits(hvd.allreduce(everyone[hvd.rank()], op=hvd.Sum, **factors), expected)
    assert same_bits(hvd.synchronize(hvd.allreduce_async(everyone[hvd.rank()], op=hvd.Sum, **factors)), expected)


def test_average_and_op_mean_what_they_did(hvd):
    own = torch.full((2,), float(hvd.rank()))
    ranks = range(hvd.size())
    for keywords, expected in (
        ({}, sum(ranks) / hvd.size()),
        ({"average": True}, sum(ranks) / hvd.size()),
        ({"average": False}, float(sum(ranks))),
        ({"op": hvd.Max}, float(hvd.size() - 1)),
    ):
        assert hvd.allreduce(own, **keywords).tolist() == pytest.approx([expected] * 2)
    with pytest.raises(ArgumentError) as caught:
        hvd.allreduce(own, average=True, op=hvd.Sum)
    assert "expected op or average, got both" in one_line(caught)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_fp16_compression_sums_halves(hvd, dtype):
    everyone = [tensor_of(rank, (33,), dtype) for rank in range(hvd.size())]
    found = hvd.allreduce(everyone[hvd.rank()], op=hvd.Sum, compression=hvd.Compression.fp16)
    small = [each.half() if dtype.is_floating_point else each for each in everyone]
    assert same_bits(found, folded(small, "Sum").to(dtype))


def test_handles_may_be_waited_for_in_any_order(hvd):
    shapes = [(number + 1,) for number in range(6)]
    everyone = [
        [tensor_of(rank, shape, torch.float32, at) for rank in range(hvd.size())] for at, shape in enumerate(shapes)
    ]
    started = [hvd.allreduce_async(each[hvd.rank()], op=hvd.Sum) for each in everyone]
    started.append(hvd.allgather_async(torch.tensor([hvd.rank()])))
    order = list(range(len(started)))
    order = order[hvd.rank() % len(order) :] + order[: hvd.rank() % len(order)]  # another on each rank
    while not hvd.poll(started[order[0]]):
        pass
    found = {at: hvd.synchronize(started[at]) for at in order}
    for at, tensors in enumerate(everyone):
        assert same_bits(found[at], folded(tensors, "Sum"))
    assert found[6].tolist() == list(range(hvd.size()))
    with pytest.raises(ArgumentError):
        hvd.synchronize(7)


@pytest.mark.parametrize(
    "kind",
    ["allreduce", "in place", "grouped", "adasum", "sparse", "allgather", "broadcast", "alltoall", "reducescatter"],
)
@pytest.mark.parametrize("ends", ["all poll", "one waits"])
def test_poll_does_not_block_and_ends_on_every_rank(hvd, kind, ends):
    """The other ranks start only after rank 0 has polled; then each polls as often as it likes."""
    rank, ranks = hvd.rank(), hvd.size()
    everyone = [torch.arange(2.0 * ranks).reshape(ranks, 2) + each for each in range(ranks)]
    total, own = sum(everyone), everyone[rank].clone()
    start, expected = {
        "allreduce": (lambda: hvd.allreduce_async(own, op=hvd.Sum), total),
        "in place": (lambda: hvd.allreduce_async_(own, op=hvd.Sum), total),
        "grouped": (
            lambda: hvd.grouped_allreduce_async([own.int(), own, own], op=hvd.Sum),
            [total.int(), total, total],
        ),
        "adasum": (lambda: hvd.allreduce_async(everyone[0], op=hvd.Adasum), everyone[0]),
        "sparse": (lambda: hvd.sparse_allreduce_async(own.to_sparse(), op=hvd.Sum), total.to_sparse()),
        "allgather": (lambda: hvd.allgather_async(own[:rank]), torch.cat([x[:at] for at, x in enumerate(everyone)])),
        "broadcast": (lambda: hvd.broadcast_async(own, ranks - 1), everyone[-1]),
        "alltoall": (
            lambda: hvd.alltoall_async(own),
            (torch.stack([each[rank] for each in everyone]), torch.ones(ranks, dtype=torch.int32)),
        ),
        "reducescatter": (lambda: hvd.reducescatter_async(own, op=hvd.Sum), total[rank : rank + 1]),
    }[kind]
    if rank == 0:
        handle = start()
        assert hvd.poll(handle) == (ranks == 1)
    MPI.COMM_WORLD.bcast(None, 0)
    if rank:
        handle = start()
    if ends == "all poll" or rank < ranks - 1:
        while not hvd.poll(handle):
            pass
        if kind == "in place":
            assert torch.equal(own, total)
        assert hvd.poll(handle)
    torch.testing.assert_close(hvd.synchronize(handle), expected, rtol=0, atol=0)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool, torch.complex64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", ["equal", "by rank", "only the last"])
def test_all_gathers_put_ranks_one_after_another(hvd, dtype, layout, lengths):
    for tail in ((), (3,), (2, 2)):
        rows = [{"equal": 4, "by rank": rank, "only the last": 2 * (rank == hvd.size() - 1)}[lengths]
                for rank in range(hvd.size())]  # fmt: skip
        everyone = [tensor_of(rank, (rows[rank], *tail), dtype) for rank in range(hvd.size())]
        own = spread(everyone[hvd.rank()], layout)
        assert same_bits(hvd.allgather(own, name="x"), torch.cat(everyone))
        both = hvd.grouped_allgather([own, torch.tensor(1.0)])
        assert same_bits(both[0], torch.cat(everyone)) and both[1].tolist() == [1.0] * hvd.size()
        assert same_bits(hvd.synchronize(hvd.allgather_async(own)), torch.cat(everyone))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool, torch.complex64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_broadcasts_bring_roots_tensor(hvd, dtype, layout):
    for root in range(hvd.size()):
        for shape in SHAPES:
            everyone = [tensor_of(rank, shape, dtype, root) for rank in range(hvd.size())]
            own = spread(everyone[hvd.rank()].clone(), layout)
            assert same_bits(hvd.broadcast(own, root, name="x"), everyone[root])
            assert same_bits(hvd.synchronize(hvd.broadcast_async(own, root)), everyone[root])
            assert same_bits(own, everyone[hvd.rank()])
            assert hvd.broadcast_(own, root) is own and same_bits(own, everyone[root])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("kind", ["equal", "uneven", "all to the first", "nothing"])
def test_all_to_alls_exchange_rows(hvd, dtype, kind):
    ranks = hvd.size()

    def count(source: int, target: int) -> int:
        return {"equal": 2, "uneven": (2 * source + target) % 3, "all to the first": 3 * (target == 0), "nothing": 0}[
            kind
        ]

    splits = [[count(source, target) for target in range(ranks)] for source in range(ranks)]
    everyone = [tensor_of(rank, (sum(splits[rank]), 2), dtype) for rank in range(ranks)]
    expected = torch.cat([everyone[source].split(splits[source])[hvd.rank()] for source in range(ranks)])
    own = everyone[hvd.rank()]
    for given in (splits[hvd.rank()], torch.tensor(splits[hvd.rank()], dtype=torch.int32)):
        rows, received = hvd.alltoall(own, splits=given)
        assert same_bits(rows, expected)
        assert received.tolist() == [splits[source][hvd.rank()] for source in range(ranks)]
    if kind in ("equal", "nothing"):
        assert same_bits(hvd.alltoall(own), expected)
    hvd.alltoall(own, splits=splits[hvd.rank()], name="counted")
    total = hvd.communicator().stats.total("all_to_all", "counted")
    assert (total["calls"], total["bytes"]) == (1, expected.nbytes)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
@pytest.mark.parametrize("op", OPS)
def test_reduce_scatters_give_each_rank_its_rows(hvd, dtype, op):
    for length in (0, 1, hvd.size(), 2 * hvd.size() + 1, 6 * hvd.size()):
        everyone = [tensor_of(rank, (length, 3), dtype, length) for rank in range(hvd.size())]
        parts = torch.tensor_split(folded(everyone, op), hvd.size())
        own = everyone[hvd.rank()]
        assert same_bits(hvd.reducescatter(own, op=getattr(hvd, op)), parts[hvd.rank()])
        assert same_bits(hvd.grouped_reducescatter([own], op=getattr(hvd, op))[0], parts[hvd.rank()])
        assert same_bits(hvd.synchronize(hvd.reducescatter_async(own, op=getattr(hvd, op))), parts[hvd.rank()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_sparse_tensors_are_summed(hvd, dtype, op):
    def sparse(rank: int) -> torch.Tensor:
        dense = torch.zeros(6, 2, dtype=dtype)
        dense[rank % 6], dense[5] = rank + 1, 1
        return dense.to_sparse(1)

    found = hvd.synchronize(hvd.sparse_allreduce_async(sparse(hvd.rank()), name="x", op=getattr(hvd, op)))
    called = hvd.sparse_allreduce_async(sparse(hvd.rank()), op=getattr(hvd, op))()  # as Horovod's handle is used
    assert torch.equal(called.to_dense(), found.to_dense())
    total = sum(sparse(rank).to_dense() for rank in range(hvd.size()))
    assert torch.equal(found.to_dense(), total / hvd.size() if op == "Average" else total)


@pytest.mark.parametrize("dtype", FLOATS)
def test_adasum_is_the_published_sum_of_each_tensor(hvd, dtype):
    shapes = ((5,), (2, 3), (), (0,), (40, 20))
    everyone = [[tensor_of(rank, shape, dtype) for shape in shapes] for rank in range(hvd.size())]
    found = hvd.grouped_allreduce(everyone[hvd.rank()], op=hvd.Adasum, name="x")
    summed = torch.float32 if dtype == torch.bfloat16 else dtype
    for index, shape in enumerate(shapes):
        rows = [everyone[rank][index].to(summed).reshape(-1).numpy() for rank in range(hvd.size())]
        expected = torch.from_numpy(adaptive_sum(rows)).to(dtype).reshape(shape)
        torch.testing.assert_close(found[index], expected)
        assert all(same_bits(row, found[index]) for row in hvd.allgather(found[index][None]))
        assert same_bits(hvd.allreduce(everyone[hvd.rank()][index], op=hvd.Adasum), found[index])
    total = hvd.communicator().stats.total("all_reduce", "x")
    nbytes = sum(each.nbytes for each in everyone[0])
    assert (total["calls"], total["bytes"]) == (1, nbytes)
