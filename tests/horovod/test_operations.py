"""Every operation x dtype x shape x way of calling it, compared as bits with the ranks' tensors by formula."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from clcomm.errors import ArgumentError, MismatchError  # noqa: E402
from tests.helpers import one_line  # noqa: E402
from tests.horovod.values import FLOATS, INTEGERS, SHAPES, adaptive_sum, folded, same_bits, spread, tensor_of  # noqa: E402

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
    assert hvd.poll(started[order[0]])
    found = {at: hvd.synchronize(started[at]) for at in order}
    for at, tensors in enumerate(everyone):
        assert same_bits(found[at], folded(tensors, "Sum"))
    assert found[6].tolist() == list(range(hvd.size()))
    with pytest.raises(ArgumentError):
        hvd.synchronize(7)


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


# --- gradients through the operations ---


def grad(tensor, result, weights):
    (result * weights).sum().backward()
    return tensor.grad


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_gradients_of_an_all_reduce_are_all_reduced(hvd, op):
    everyone = [tensor_of(rank, (4,), torch.float64, 1) for rank in range(hvd.size())]
    own = torch.ones(4, dtype=torch.float64, requires_grad=True)
    found = grad(own, hvd.allreduce(own, op=getattr(hvd, op)), everyone[hvd.rank()])
    assert same_bits(found, folded(everyone, op))
    pair = [torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    sum(hvd.grouped_allreduce(pair, op=getattr(hvd, op))).mul(everyone[hvd.rank()]).sum().backward()
    assert all(same_bits(each.grad, folded(everyone, op)) for each in pair)


def test_gradients_of_the_others_come_back_to_where_rows_came_from(hvd):
    rank, ranks = hvd.rank(), hvd.size()
    own = torch.ones(rank + 1, 2, dtype=torch.float64, requires_grad=True)
    rows = sum(range(1, ranks + 1))
    weights = [tensor_of(each, (rows, 2), torch.float64, 2) for each in range(ranks)]
    found = grad(own, hvd.allgather(own), weights[rank])
    first = sum(range(1, rank + 1))
    assert same_bits(found, folded(weights, "Average")[first : first + rank + 1])
    for root in range(ranks):
        one = torch.ones(3, dtype=torch.float64, requires_grad=True)
        each = [tensor_of(other, (3,), torch.float64, 3) for other in range(ranks)]
        expected = folded(each, "Average") if rank == root else torch.zeros(3, dtype=torch.float64)
        assert same_bits(grad(one, hvd.broadcast(one, root), each[rank]), expected)
    sent = torch.ones(2 * ranks, dtype=torch.float64, requires_grad=True)
    factors = torch.arange(2.0 * ranks, dtype=torch.float64) + 100 * rank
    expected = torch.cat(
        [torch.tensor([2.0 * rank, 2.0 * rank + 1], dtype=torch.float64) + 100 * to for to in range(ranks)]
    )
    assert same_bits(grad(sent, hvd.alltoall(sent), factors), expected)


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_gradients_of_a_reduce_scatter_are_gathered(hvd, op):
    own = torch.ones(2 * hvd.size() + 1, dtype=torch.float64, requires_grad=True)
    part = hvd.reducescatter(own, op=getattr(hvd, op), prescale_factor=2.0)
    found = grad(own, part, torch.full(part.shape, hvd.rank() + 1.0, dtype=torch.float64))
    lengths = [len(each) for each in torch.tensor_split(own, hvd.size())]
    factor = 2.0 * (hvd.size() if op == "Sum" else 1)
    assert found.tolist() == [factor * (rank + 1) for rank, length in enumerate(lengths) for _ in range(length)]


# --- Adasum, process sets ---


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


def test_a_process_set_is_a_world_of_its_own(hvd):
    halves = [[rank for rank in range(hvd.size()) if rank % 2 == parity] for parity in (0, 1)]
    sets = [hvd.add_process_set(ranks) for ranks in halves if ranks]
    mine = next(each for each in sets if each.included())
    ranks = mine.ranks
    assert (mine.size(), mine.rank()) == (len(ranks), ranks.index(hvd.rank()))
    own = torch.tensor([float(hvd.rank())])
    assert hvd.allreduce(own, op=hvd.Sum, process_set=mine).item() == sum(ranks)
    assert hvd.allgather(own, process_set=mine).tolist() == ranks
    assert hvd.broadcast(own, ranks[-1], process_set=mine).item() == ranks[-1]
    assert hvd.allgather_object(hvd.rank(), process_set=mine) == ranks
    for other in sets:
        if other is not mine:
            with pytest.raises(ArgumentError) as caught:
                hvd.allreduce(own, process_set=other)
            assert "expected a call by its ranks" in one_line(caught)
    hvd.barrier(process_set=mine)
    assert all(hvd.remove_process_set(each) for each in sets) and not hvd.remove_process_set(mine)
    with pytest.raises(ArgumentError):
        hvd.allreduce(own, process_set=mine)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_add_different_sets_all_get_the_same_error(hvd):
    with pytest.raises(MismatchError) as caught:
        hvd.add_process_set([hvd.rank()])
    assert len(set(hvd.allgather_object(one_line(caught)))) == 1
    for wrong in (["a"], 1.5, "01"):
        with pytest.raises(ArgumentError) as caught:
            hvd.ProcessSet(wrong)
        assert "expected numbers of ranks" in one_line(caught)


def test_sets_may_be_announced(hvd):
    hvd.shutdown()
    with pytest.raises(ArgumentError) as caught:
        hvd.init(process_sets="static")
    assert "got 'static'" in one_line(caught)
    hvd.init(process_sets="dynamic")
    added = hvd.ProcessSet([0])
    hvd.shutdown()
    hvd.init(process_sets=[added])
    assert added.size() == 1


def test_queries(hvd):
    assert hvd.is_initialized() and 0 <= hvd.rank() < hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.mpi_built() and hvd.mpi_enabled() and not hvd.mpi_threads_supported()
    assert not any(each() for each in (hvd.gloo_built, hvd.gloo_enabled, hvd.nccl_built, hvd.ccl_built, hvd.cuda_built))
    hvd.init()  # a second one does nothing
    with pytest.raises(ArgumentError) as caught:
        hvd.run(lambda: None, np=3)
    assert one_line(caught).endswith("clcomm run -n 3 train.py")


# --- mistakes ---


def mistakes(hvd):
    return {
        "no tensor": (lambda: hvd.allreduce([1.0]), "expected a torch.Tensor, got list"),
        "sparse": (lambda: hvd.allreduce(torch.eye(2).to_sparse()), "expected a dense tensor"),
        "no list": (lambda: hvd.grouped_allreduce(torch.ones(2)), "expected a list of tensors, got Tensor"),
        "op": (lambda: hvd.allreduce(torch.ones(2), op="sum"), "expected hvd.Average"),
        "adasum of integers": (
            lambda: hvd.allreduce(torch.ones(2).int(), op=hvd.Adasum),
            "needs a real floating dtype",
        ),
        "quarter precision": (lambda: hvd.allreduce(torch.ones(2).to(torch.float8_e5m2)), "that can be summed"),
        "complex halves": (lambda: hvd.allreduce(torch.zeros(2, dtype=torch.complex32)), "that can be summed"),
        "root": (lambda: hvd.broadcast(torch.ones(2), 99), "root_rank: expected one of the ranks"),
        "splits": (lambda: hvd.alltoall(torch.ones(4), splits=[9] * hvd.size()), "splits: expected"),
        "number": (lambda: hvd.alltoall(torch.tensor(1.0)), "expected a first dimension that"),
        "scatter a number": (lambda: hvd.reducescatter(torch.tensor(1.0)), "expected at least one dimension"),
        "scatter adasum": (lambda: hvd.reducescatter(torch.ones(2), op=hvd.Adasum), "expected another than Adasum"),
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", sorted(mistakes(None)))
def test_a_mistake_is_one_line_and_harms_nothing(hvd, kind):
    call, said = mistakes(hvd)[kind]
    with pytest.raises(ArgumentError) as caught:
        call()
    assert said in one_line(caught)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "kind", ["shape", "dimensions", "group", "adasum", "dtype", "operation", "name", "rows", "columns", "root"]
)
def test_ranks_that_differ_all_get_the_same_error(hvd, kind):
    is_odd = hvd.rank() == hvd.size() - 1
    calls = {
        "shape": lambda: hvd.allreduce(torch.ones(4 + is_odd)),
        "dimensions": lambda: hvd.allreduce(torch.ones((2, 3) if is_odd else (3, 2))),
        "group": lambda: hvd.grouped_allreduce([torch.ones(4 - is_odd), torch.ones(4 + is_odd)]),
        "adasum": lambda: hvd.grouped_allreduce([torch.ones(4 - is_odd), torch.ones(4 + is_odd)], op=hvd.Adasum),
        "columns": lambda: hvd.alltoall(torch.ones(2 * hvd.size(), 2 + is_odd)),
        "dtype": lambda: hvd.allreduce(torch.ones(4, dtype=torch.float64 if is_odd else torch.float32)),
        "operation": lambda: hvd.allgather(torch.ones(4)) if is_odd else hvd.allreduce(torch.ones(4)),
        "name": lambda: hvd.allreduce(torch.ones(4), name="a" if is_odd else "b"),
        "rows": lambda: hvd.allgather(torch.ones(4, 2 + is_odd)),
        "root": lambda: hvd.broadcast(torch.ones(4), int(is_odd)),
    }
    with pytest.raises(MismatchError) as caught:
        calls[kind]()
    texts = hvd.allgather_object(one_line(caught))
    assert len(set(texts)) == 1
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
