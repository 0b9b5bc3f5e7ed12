"""One suite that every transport passes, on any number of ranks: values from rank formulas, bits from a NumPy fold."""

from __future__ import annotations

import numpy as np
import pytest

from tests.transport.references import drawn, same_bits

OPS = ("sum", "mean", "min", "max")
DTYPES = ("float16", "float32", "float64", "complex64", "int8", "int32", "int64", "uint16", "bool")
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 1000, 33_333)
HUGE = 1_500_007  # several reduction pieces for each rank, and no even shards


def _valid(dtype: str, op: str) -> bool:
    return op != "mean" or np.dtype(dtype).kind in "fc"


REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPS if _valid(dtype, op)]


def _all(bench, size: int, dtype: str, seed: int = 0) -> list[np.ndarray]:
    return [drawn(rank, size, dtype, seed) for rank in range(bench.size)]


# --- all-reduce ---


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_an_all_reduce_has_the_bits_of_a_fold_in_the_promised_order(bench, dtype, op):
    whole = bench.array(np.zeros(max(LENGTHS) + 5, dtype))
    result = bench.array(np.zeros(max(LENGTHS) + 5, dtype))
    for seed, length in enumerate(LENGTHS):
        rows = _all(bench, length, dtype, seed)
        source, out = whole[3 : 3 + length], result[5 : 5 + length]
        source[:] = rows[bench.rank]
        bench.transport.all_reduce(source, out, op)
        assert same_bits(out, bench.folded(rows, op)), f"{length} elements"
        assert same_bits(source, rows[bench.rank]), "the source was written to"
        assert not result[:5].any()
        assert not result[5 + length :].any() or seed


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_an_all_reduce_in_place(bench, dtype, op):
    memory = bench.array(np.zeros(max(LENGTHS), dtype))
    for seed, length in enumerate(LENGTHS):
        rows = _all(bench, length, dtype, seed)
        array = memory[:length]
        array[:] = rows[bench.rank]
        bench.transport.all_reduce(array, array, op)
        assert same_bits(array, bench.folded(rows, op)), f"{length} elements"


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_an_all_reduce_into_common_memory(bench, op):
    out = bench.common(np.zeros(max(LENGTHS), np.float32))
    memory = bench.array(np.zeros(max(LENGTHS), np.float32))
    for seed, length in enumerate(LENGTHS):
        rows = _all(bench, length, "float32", seed)
        memory[:length] = rows[bench.rank]
        bench.transport.all_reduce(memory[:length], out[:length], op)
        assert same_bits(out[:length].copy(), bench.folded(rows, op)), f"{length} elements"
        bench.transport.barrier()  # no rank writes the next result while another one compares this one


@pytest.mark.parametrize("in_place", [True, False])
def test_a_long_all_reduce(bench, in_place):
    rows = _all(bench, HUGE, "float32")
    source = bench.array(rows[bench.rank])
    out = source if in_place else bench.array(np.zeros(HUGE, np.float32))
    bench.transport.all_reduce(source, out, "mean")
    assert same_bits(out, bench.folded(rows, "mean"))


def test_cutting_an_array_into_calls_changes_no_bit(bench):
    rows = _all(bench, 10_000, "float32")
    source = bench.array(rows[bench.rank])
    expected = bench.folded(rows, "mean")
    rng = np.random.default_rng(0)
    for cuts in ([], [1], [9_999], sorted(rng.integers(0, 10_000, 20).tolist())):
        out = bench.array(np.zeros(10_000, np.float32))
        for start, stop in zip([0, *cuts], [*cuts, 10_000], strict=True):
            bench.transport.all_reduce(source[start:stop], out[start:stop], "mean")
        assert same_bits(out, expected)


def test_sums_by_the_rank_formula(bench):
    source = bench.array(np.full(100, bench.rank, np.int64))
    out = bench.array(np.zeros(100, np.int64))
    for op, expected in (
        ("sum", bench.size * (bench.size - 1) // 2),
        ("min", 0),
        ("max", bench.size - 1),
    ):
        bench.transport.all_reduce(source, out, op)
        assert (out == expected).all(), op
    ranks = bench.array(np.full(100, bench.rank, np.float32))
    bench.transport.all_reduce(ranks, ranks, "mean")
    assert (ranks == (bench.size - 1) / 2).all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("length", [5, 40_000])
def test_nan_and_inf_pass_through_without_a_warning(bench, op, length):
    last = bench.size - 1
    values = np.ones(length, np.float32)
    if bench.rank == last:
        values[:3] = np.nan, np.inf, -np.inf
    if bench.rank == 0:
        values[3:5] = np.float32(3e38), np.inf if last else 1
    array = bench.array(values)
    bench.transport.all_reduce(array, array, op)
    assert np.isnan(array[0])
    assert array[1] == (np.inf if op != "min" or last == 0 else 1)
    assert array[2] == (-np.inf if op != "max" or last == 0 else 1)
    assert np.isfinite(array[5:]).all()


def test_a_sum_that_overflows_is_inf_on_every_rank(bench):
    array = bench.array(np.full(100, 3e38, np.float32))
    bench.transport.all_reduce(array, array, "sum")
    assert np.isinf(array).all() if bench.size > 1 else np.isfinite(array).all()


# --- the others ---


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex64"])
@pytest.mark.parametrize("length", [0, 1, 1001])
def test_a_broadcast_gives_all_roots_values_whoever_is_root(bench, dtype, length):
    array = bench.array(np.zeros(length, dtype))
    for root in range(bench.size):
        array[:] = drawn(bench.rank, length, dtype, root)
        bench.transport.broadcast(array, root)
        assert same_bits(array, drawn(root, length, dtype, root))


@pytest.mark.parametrize("length", [0, 1, 1001])
def test_an_all_gather_puts_ranks_in_order(bench, length):
    source = bench.array(drawn(bench.rank, length, "float64"))
    out = np.full(bench.size * length, 9.0)
    bench.transport.all_gather(source, out)
    assert same_bits(out, np.concatenate(_all(bench, length, "float64")))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("length", [0, 1, 777, 20_001])
def test_a_reduce_scatter_gives_each_rank_its_block(bench, op, length):
    rows = _all(bench, length * bench.size, "float32")
    source = bench.array(rows[bench.rank])
    out = np.zeros(length, np.float32)
    bench.transport.reduce_scatter(source, out, op)
    block = slice(bench.rank * length, (bench.rank + 1) * length)
    assert same_bits(out, bench.folded([row[block] for row in rows], op))
    assert same_bits(source, rows[bench.rank])


def test_a_reduce_scatter_may_write_into_its_own_source(bench):
    length = 50
    rows = _all(bench, length * bench.size, "float32")
    source = bench.array(rows[bench.rank])
    bench.transport.reduce_scatter(source, source[:length], "sum")
    block = slice(bench.rank * length, (bench.rank + 1) * length)
    assert same_bits(source[:length], bench.folded([row[block] for row in rows], "sum"))


@pytest.mark.parametrize("length", [0, 1, 20_011])
def test_an_all_to_all_gives_each_pair_its_own_array(bench, length):
    """Of lengths that differ between pairs, some of them 0."""

    def sent(source, target):
        return drawn(source, length * ((source + 2 * target) % 3), "float64", target)

    sends = [sent(bench.rank, target) for target in range(bench.size)]
    receives = [np.full_like(sent(source, bench.rank), 9.0) for source in range(bench.size)]
    bench.transport.all_to_all(sends, receives)
    for source, array in enumerate(receives):
        assert same_bits(array, sent(source, bench.rank))


def test_a_barrier_and_who_is_who(bench):
    bench.transport.barrier()
    assert 0 <= bench.rank < bench.size
    assert bench.transport.name in ("solo", "mpi", "memory", "shared", "hierarchical")
