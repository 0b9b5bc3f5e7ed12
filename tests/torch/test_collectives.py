"""torch.distributed's collectives on backend clcomm: dtype x operation x shape x contiguity x group."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402

from tests.torch.references import (  # noqa: E402
    DTYPES,
    OPS,
    SHAPES,
    all_gather_single,
    drawn,
    folded,
    reduce_op,
    reduce_scatter_single,
    same,
    strided,
    supports,
)

pytestmark = pytest.mark.mpi(min_size=1)
GROUPS = ("world", "even", "last", "again")
#: Sizes around those of the slots, of the staging memory at first, and of its pieces (bytes of float32).
LONG = (2048, 2049, 16_385, (1 << 20) + 3, 2_500_001)


@pytest.fixture(params=GROUPS)
def members(groups, request):
    """The ranks of a group that this rank is in, and the group."""
    ranks, group = groups[request.param]
    if dist.get_rank() not in ranks:
        pytest.skip("not a member")
    return ranks, group


def rows_of(ranks, shape, dtype, seed=0):
    return [drawn(rank, shape, dtype, seed) for rank in ranks]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_all_reduce(members, dtype, op):
    ranks, group = members
    if not supports(op, dtype):
        pytest.skip("undefined")
    for seed, shape in enumerate(SHAPES):
        for layout in (torch.Tensor.clone, strided):
            rows = rows_of(ranks, shape, dtype, seed)
            tensor = layout(rows[dist.get_rank(group)])
            dist.all_reduce(tensor, reduce_op(op), group)
            assert same(tensor, folded(rows, op)), (shape, layout)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_a_mean_of_integers_is_cut_towards_zero(members, dtype):
    ranks, group = members
    mine = torch.tensor([1, -1, 7, -7, 0], dtype=dtype) * (dist.get_rank() + 1)
    total = sum(rank + 1 for rank in ranks)
    expected = [int(total * each / len(ranks)) for each in (1, -1, 7, -7, 0)]
    reduced, scattered = mine.clone(), torch.zeros(5, dtype=dtype)
    dist.all_reduce(reduced, dist.ReduceOp.AVG, group)
    reduce_scatter_single(scattered, mine.repeat(len(ranks)), dist.ReduceOp.AVG, group)
    assert reduced.tolist() == scattered.tolist() == expected


@pytest.mark.parametrize("length", LONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_long_all_reduce(members, length, dtype):
    ranks, group = members
    rows = rows_of(ranks, (length,), dtype)
    for op in ("SUM", "AVG"):
        tensor = rows[dist.get_rank(group)].clone()
        dist.all_reduce(tensor, reduce_op(op), group)
        assert same(tensor, folded(rows, op))


@pytest.mark.parametrize("length", [1, 1000, 3_000_000])
def test_a_tensor_in_shared_memory_has_the_same_sum(groups, length):
    import clcomm.torch

    ranks, _ = groups["world"]
    rows = rows_of(ranks, (length,), torch.float32)
    tensor = clcomm.torch.empty(length)
    assert not tensor.any()
    assert clcomm.torch.communicator().holds(tensor.numpy()) == clcomm.torch.communicator().shares_memory
    tensor.copy_(rows[dist.get_rank()])
    dist.all_reduce(tensor)
    assert same(tensor, folded(rows, "SUM"))


def test_all_reduce_coalesced(members):
    ranks, group = members
    shapes = [(3,), (2, 5), (), (40_000,)]
    rows = [rows_of(ranks, shape, torch.float32, seed) for seed, shape in enumerate(shapes)]
    tensors = [each[dist.get_rank(group)].clone() for each in rows]
    tensors[1] = strided(tensors[1])
    with pytest.warns(FutureWarning):
        dist.all_reduce_coalesced(tensors, group=group)
    assert all(same(tensor, folded(each, "SUM")) for tensor, each in zip(tensors, rows, strict=True))
    with dist._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
def test_reduce_changes_root_alone(members, op):
    ranks, group = members
    for root in ranks:
        for dtype in (torch.float32, torch.bfloat16):
            rows = rows_of(ranks, (5, 3), dtype)
            mine = rows[dist.get_rank(group)]
            tensor = strided(mine)
            dist.reduce(tensor, root, reduce_op(op), group)
            assert same(tensor, folded(rows, op) if dist.get_rank() == root else mine)


def test_sparse_all_reduce(members):
    ranks, group = members
    dense = [drawn(rank, (6, 2), torch.float32) * (torch.arange(6) % (rank + 2) == 0)[:, None] for rank in ranks]
    tensor = dense[dist.get_rank(group)].to_sparse()
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor.to_dense(), folded(dense, "SUM"))


# --- copies ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_of_equal_shapes(members, dtype):
    ranks, group = members
    me, size = dist.get_rank(group), len(ranks)
    for seed, shape in enumerate(SHAPES):
        for layout in (torch.Tensor.clone, strided):
            rows = rows_of(ranks, shape, dtype, seed)
            for at, root in enumerate(ranks):
                tensor = layout(rows[me])
                dist.broadcast(tensor, root, group)
                assert same(tensor, rows[at])
                gathered = [layout(torch.zeros_like(rows[0])) for _ in ranks] if me == at else None
                dist.gather(layout(rows[me]), gathered, root, group)
                assert gathered is None or all(map(same, gathered, rows))
                received = layout(torch.zeros_like(rows[0]))
                dist.scatter(received, [layout(row) for row in rows] if me == at else None, root, group)
                assert same(received, rows[me])
            gathered = [layout(torch.zeros_like(rows[0])) for _ in ranks]
            dist.all_gather(gathered, layout(rows[me]), group)
            assert all(map(same, gathered, rows))
            single = torch.zeros((size, *shape), dtype=dtype)
            all_gather_single(single.view(size, *shape), rows[me], group)
            assert all(map(same, single, rows))


def test_all_gather_of_different_lengths(members):
    ranks, group = members
    rows = [drawn(rank, (rank + 1, 3), torch.float32) for rank in ranks]
    gathered = [torch.zeros_like(row) for row in rows]
    dist.all_gather(gathered, rows[dist.get_rank(group)], group)
    assert all(map(same, gathered, rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float16], ids=str)
@pytest.mark.parametrize("op", ["SUM", "MAX", "AVG"])
def test_reduce_scatter(members, dtype, op):
    ranks, group = members
    if not supports(op, dtype):
        pytest.skip("undefined")
    me, size = dist.get_rank(group), len(ranks)
    for length in (0, 1, 5, 30_000):
        blocks = [[drawn(rank, (length,), dtype, seed) for seed in range(size)] for rank in ranks]
        expected = folded([each[me] for each in blocks], op)
        output = torch.zeros(length, dtype=dtype)
        dist.reduce_scatter(output, [strided(block) for block in blocks[me]], reduce_op(op), group)
        assert same(output, expected)
        output = strided(torch.zeros(length, dtype=dtype))
        reduce_scatter_single(output, torch.cat(blocks[me]), reduce_op(op), group)
        assert same(output, expected)


def test_reduce_scatter_of_different_lengths(members):
    ranks, group = members
    me, size = dist.get_rank(group), len(ranks)
    blocks = [[drawn(rank, (block + 1,), torch.float32) for block in range(size)] for rank in ranks]
    output = torch.zeros(me + 1)
    dist.reduce_scatter(output, blocks[me], group=group)
    assert same(output, folded([each[me] for each in blocks], "SUM"))


def test_all_to_all(members):
    ranks, group = members
    me, size = dist.get_rank(group), len(ranks)

    def sent(source, target):  # rows from one rank to another; 0 for some pairs
        return drawn(source, ((source + 2 * target) % 4, 3), torch.float32, target)

    received = [torch.zeros_like(sent(source, me)) for source in range(size)]
    dist.all_to_all(received, [sent(me, target) for target in range(size)], group)
    assert all(same(got, sent(source, me)) for source, got in enumerate(received))

    rows = [sent(me, target) for target in range(size)]
    output = torch.zeros((sum(len(each) for each in received), 3))
    dist.all_to_all_single(
        output, torch.cat(rows), [len(each) for each in received], [len(each) for each in rows], group
    )
    assert same(output, torch.cat(received))

    equal = drawn(me, (2 * size, 3), torch.bfloat16)
    output = strided(torch.zeros_like(equal))
    dist.all_to_all_single(output, equal, group=group)
    assert same(
        output, torch.cat([drawn(rank, (2 * size, 3), torch.bfloat16)[2 * me : 2 * me + 2] for rank in range(size)])
    )


def test_coalesced_gathers_and_reduce_scatters(groups):
    ranks, group = groups["world"]
    me, size = dist.get_rank(), len(ranks)
    shapes = [(2,), (3, 2)]
    inputs = [drawn(me, shape, torch.float32, seed) for seed, shape in enumerate(shapes)]
    outputs = [torch.zeros((size, *shape)) for shape in shapes]
    with dist._coalescing_manager(group):
        for output, source in zip(outputs, inputs, strict=True):
            all_gather_single(output, source, group)
    for seed, (output, shape) in enumerate(zip(outputs, shapes, strict=True)):
        assert all(map(same, output, rows_of(ranks, shape, torch.float32, seed)))
    with dist._coalescing_manager(group):
        for output, source in zip(outputs, inputs, strict=True):
            reduce_scatter_single(source, output, group=group)
    for seed, (source, shape) in enumerate(zip(inputs, shapes, strict=True)):
        assert same(source, folded([drawn(me, shape, torch.float32, seed)] * size, "SUM"))


def test_objects(members):
    ranks, group = members
    me, size, mine = dist.get_rank(group), len(ranks), {"rank": dist.get_rank(), "text": "x" * dist.get_rank()}
    everyone = [{"rank": rank, "text": "x" * rank} for rank in ranks]
    gathered = [None] * size
    dist.all_gather_object(gathered, mine, group)
    assert gathered == everyone
    for at, root in enumerate(ranks):
        received = [None]
        dist.scatter_object_list(received, everyone if me == at else None, root, group)
        assert received == [mine]
        shared = [mine, 3] if me == at else [None, None]
        dist.broadcast_object_list(shared, root, group)
        assert shared == [everyone[at], 3]
        collected = [None] * size if me == at else None
        dist.gather_object(mine, collected, root, group)
        assert collected == (everyone if me == at else None)


def test_functional_collectives(groups):
    import torch.distributed._functional_collectives as functional

    ranks, group = groups["world"]
    size, me = len(ranks), dist.get_rank()
    rows = rows_of(ranks, (2 * size, 3), torch.float32)
    gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)  # since 2.13
    scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)
    assert same(functional.all_reduce(rows[me], "sum", group).clone(), folded(rows, "SUM"))
    assert same(gather(rows[me], 0, group).clone(), torch.cat(rows))
    block = scatter(rows[me], "sum", 0, group)
    assert same(block.clone(), folded(rows, "SUM")[2 * me : 2 * me + 2])
    exchanged = functional.all_to_all_single(rows[me], None, None, group)
    assert same(exchanged.clone(), torch.cat([row[2 * me : 2 * me + 2] for row in rows]))
    assert same(functional.broadcast(rows[me], 0, group).clone(), rows[0])
    coalesced = functional.all_reduce_coalesced([rows[me], rows[me] * 2], "sum", group)
    assert same(coalesced[1].clone(), folded([row * 2 for row in rows], "SUM"))
