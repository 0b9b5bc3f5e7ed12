"""NumPy's encodings against references in plain Python and float64, with ties, NaN, Inf, zeros and odd lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clcomm.base.host.arrays import BFLOAT16, from_bfloat16
from clcomm.sync.compression.coding import BLOCK, chars_nbytes, largest_nbytes
from tests.coding import Coding

CODING = Coding(None)
SEEDS = range(40)


def drawn(seed: int, dtype: str = "float32", special: bool = True) -> np.ndarray:
    """Return values of many sizes: from 1 element to several blocks, with ties, zeros and, unless not special, NaN."""
    rng = np.random.default_rng(seed)
    count = int(rng.choice([1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]))
    values = rng.standard_normal(count) * 10.0 ** rng.integers(-4, 5, count)
    values[rng.random(count) < 0.2] = 0.0
    values[rng.random(count) < 0.2] = rng.choice([1.5, -1.5])
    if special and seed % 4 == 0:
        values[rng.random(count) < 0.05] = rng.choice([np.nan, np.inf, -np.inf])
    return values.astype(dtype)


def chosen_of(wanted: np.ndarray, count: int) -> list[int]:
    """Return the indices of the largest magnitudes, ascending; NaN counts as Inf, of equal ones the first goes."""
    size = [math.inf if math.isnan(value) else abs(value) for value in wanted.tolist()]
    return sorted(sorted(range(len(size)), key=lambda index: (-size[index], index))[:count])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_largest_are_sent_and_the_rest_stays(seed: int, dtype: str) -> None:
    values, residual = drawn(seed, dtype), drawn(seed + 1000, dtype, special=False)[:1]
    residual = np.resize(residual, values.size)
    wanted = values + residual
    count = int(np.random.default_rng(seed).integers(1, values.size + 1))
    rows = np.zeros((2, largest_nbytes(count, values.dtype)), np.uint8)
    CODING.to_largest(values, residual, rows, 1)()
    expected = chosen_of(wanted, count)
    assert rows[1, : 4 * count].view(np.uint32).tolist() == expected
    assert rows[1, 4 * count :].view(dtype).tobytes() == wanted[expected].tobytes()
    left = [0.0 if index in set(expected) or not math.isfinite(value) else value
            for index, value in enumerate(wanted.tolist())]  # fmt: skip
    assert residual.tolist() == left and not rows[0].any()


@pytest.mark.sampled(40)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_mean_of_the_largest_sums_in_rank_order(seed: int, ranks: int) -> None:
    wanted = [drawn(seed, special=False) * np.float32(rank + 1) for rank in range(ranks)]
    count = max(1, wanted[0].size // 3)
    rows = np.zeros((ranks, largest_nbytes(count, np.dtype("float32"))), np.uint8)
    for rank, values in enumerate(wanted):
        CODING.to_largest(values, np.zeros_like(values), rows, rank)()
    out = np.full_like(wanted[0], 7)
    CODING.mean_of_largest(rows, out)()
    for index in range(out.size):
        total = np.float32(0)
        for values in wanted:
            total += values[index] if index in chosen_of(values, count) else np.float32(0)
        assert out[index] == total / np.float32(ranks)


@pytest.mark.parametrize("seed", SEEDS)
def test_chars_are_rounded_by_block_and_the_error_stays(seed: int) -> None:
    values, residual = drawn(seed), np.resize(drawn(seed + 1000, special=False), drawn(seed).size)
    wanted = (values + residual).astype(np.float32)
    rows = np.zeros((1, chars_nbytes(values.size)), np.uint8)
    CODING.to_chars(values, residual, rows, 0)()
    out = np.zeros_like(values)
    CODING.mean_of_chars(rows, out)()
    for start in range(0, values.size, BLOCK):
        block, got = wanted[start : start + BLOCK].astype(float), out[start : start + BLOCK].astype(float)
        kept = residual[start : start + BLOCK]
        if not np.isfinite(block).all():
            assert not np.isfinite(got).any() and not kept.any()
            continue
        step = np.abs(block).max() / 127
        assert (np.abs(block - got) <= step * (0.5 + 1e-5)).all()
        assert np.array_equal(kept, (wanted[start : start + BLOCK] - out[start : start + BLOCK]))
        assert (got[block == 0] == 0).all()


@pytest.mark.parametrize("divisor", [1, 3, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_sixteen_bits_are_the_nearest(seed: int, divisor: int) -> None:
    values = drawn(seed)
    half, brain = np.zeros(values.size, np.float16), np.zeros(values.size, BFLOAT16)
    CODING.to_halves(values, half, divisor)()
    CODING.to_bfloat16(values, brain, divisor)()
    divided = values / np.float32(divisor)
    with np.errstate(over="ignore"):
        assert np.array_equal(half, divided.astype(np.float16), equal_nan=True)
    finite = np.isfinite(divided)
    error = np.abs(from_bfloat16(brain)[finite].astype(float) - divided[finite].astype(float))
    assert (error <= np.abs(divided[finite].astype(float)) * 2.0**-8).all()
    assert np.array_equal(np.isnan(from_bfloat16(brain)), np.isnan(divided))
    back = [np.zeros_like(values), np.zeros_like(values)]
    CODING.from_halves(half, back[0])()
    CODING.from_bfloat16(brain, back[1])()
    assert np.array_equal(back[0], half.astype(np.float32), equal_nan=True)
    assert np.array_equal(back[1], from_bfloat16(brain), equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(1, 1, 1), (5, 3, 1), (7, 300, 4), (64, 31, 2)])
def test_products_with_factors(rows: int, columns: int, rank: int, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    matrix, first, second = (
        rng.standard_normal(shape).astype(dtype) for shape in ((rows, columns), (rank, rows), (rank, columns))
    )
    thin, wide, product = np.empty((rank, rows), dtype), np.empty((rank, columns), dtype), np.empty_like(matrix)
    CODING.times(matrix, second, thin)()
    CODING.transposed_times(matrix, first, wide)()
    CODING.outer(first, second, product)()
    m, p, q = (each.astype(float) for each in (matrix, first, second))
    tolerance = 1e-12 if dtype == "float64" else 2e-5
    for got, expected in ((thin, (m @ q.T).T), (wide, (m.T @ p.T).T), (product, p.T @ q)):
        assert np.allclose(got, expected, rtol=tolerance, atol=tolerance * 10)
