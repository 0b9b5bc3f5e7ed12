"""Kernels on host memory, where it lies: sums over ranks, codings of gradients, thin factors; and the hash of a buffer.

Arrays are followed by a guard, which holds NaN for float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from clcomm.base.host.arrays import BFLOAT16, aligned_empty, hash_words, to_bfloat16
from clcomm.comm.transport.fused import (
    ARRIVED_NS,
    CLAIMS,
    COMPLETE,
    DIFFERENT,
    LAST_RANK,
    LATE_NS,
    MARKS,
    NOT_LEFT,
    NOT_MET,
    PART,
    POLLS,
    RANK,
    RESUMES,
    SLEEPERS,
    STATE,
    STRIDE,
    TAG,
    WAITED_NS,
)
from clcomm.comm.transport.rendezvous import last_of
from clcomm.engine import host_kernels
from clcomm.engine.codec import DeviceCodec, hash_buffer
from clcomm.engine.device import Device
from clcomm.engine.fold import MOST_ROWS, DeviceFold
from clcomm.sync.compression.coding import chars_nbytes, largest_nbytes
from tests.coding import Coding
from tests.families.family import Family, assert_equal, assert_near, drawn, whole_numbers
from training.engines.gather import DeviceGather

_GUARD = 4096


class Arrays:
    """Makes arrays for kernels, and checks the bytes after them."""

    def __init__(self) -> None:
        self._made: list[tuple[np.ndarray, int]] = []

    def holding(self, values: np.ndarray) -> np.ndarray:
        """Return the values in an array that a device can use."""
        array = self.empty(values.shape, values.dtype)
        array[...] = values
        return array

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return an array of NaN."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        whole = aligned_empty((nbytes + _GUARD,), np.uint8)
        whole[...] = 0xFF
        self._made.append((whole, nbytes))
        return whole[:nbytes].view(dtype).reshape(shape)

    def check(self) -> None:
        """Assert that nothing was written past an array's end."""
        for whole, nbytes in self._made:
            assert (whole[nbytes:] == 0xFF).all(), f"a kernel wrote past an array of {nbytes} bytes"


class Case(NamedTuple):
    """`rows` of `size` elements each."""

    size: int
    rows: int
    divisor: int
    seed: int


def draw(rng: np.random.Generator, longest: int, number: int) -> Case:
    """Draw up to a few cache lines, or around a block of 256."""
    size = int(rng.integers(1, 3 * longest) if longest < 20 or rng.integers(2) else rng.integers(1, 800))
    return Case(size, int(rng.integers(2, 3 * MOST_ROWS)), int(rng.integers(1, 10)), int(rng.integers(1 << 30)))


def check_fold(device: Device, case: Case) -> None:
    """Compare sums over ranks of float32, float16 and bfloat16, in memory of their own and in row 0."""
    hosts = [whole_numbers(case.seed + row, case.size) for row in range(case.rows)]
    total = np.sum(hosts, 0, dtype=np.float64)
    fold = DeviceFold(device)
    for divisor, in_place in ((case.divisor, False), (1, True)):
        arrays = Arrays()
        rows = [arrays.holding(host) for host in hosts]
        out = rows[0] if in_place else arrays.empty((case.size,))
        _run(fold(rows, out, divisor))
        assert_near(out, total / divisor, "fold", 1e-6)
        arrays.check()
    for to_half, dtype in ((lambda host: host.astype(np.float16), np.float16), (_to_bfloat16, BFLOAT16)):
        arrays = Arrays()
        rows, out = [arrays.holding(to_half(host)) for host in hosts], arrays.empty((case.size,), dtype)
        _run(fold(rows, out, 1))
        assert out.tobytes() == to_half(total.astype(np.float32)).tobytes(), dtype
        arrays.check()


@contextmanager
def _some_launched(case: Case) -> Iterator[None]:
    """Let every second case launch its kernel where Python could call the kernel's function."""
    is_supported = host_kernels.is_supported
    host_kernels.is_supported = lambda: case.seed % 2 == 0 and is_supported()
    try:
        yield
    finally:
        host_kernels.is_supported = is_supported


def check_rendezvous(device: Device, case: Case) -> None:
    """Compare a whole all-reduce, for each way in which the other ranks' counters and tags can stand."""
    ranks, stride = 2 + case.rows % (MOST_ROWS - 1), 5 + case.seed % 40
    hosts = [whole_numbers(case.seed + row, case.size) for row in range(ranks)]
    total = np.sum(hosts, 0, dtype=np.float64) / case.divisor
    own, other, number = case.seed % ranks, (case.seed + 1) % ranks, case.seed // 7
    ends = sorted((case.seed % (case.size + 1), case.seed // 3 % (case.size + 1)))
    arrived = [100 + (case.seed >> rank) % 50 for rank in range(ranks)]
    ways = [(COMPLETE, 2, 0), (NOT_MET, 0, 0), (DIFFERENT, 2, 0), (NOT_LEFT, 1, 0)]
    if device.runs_in_caller:
        ways += [(SLEEPERS, 2, 1), (NOT_MET, 0, 1), (DIFFERENT, 2, 1)]
    for state, reached, asleep in ways:
        arrays = Arrays()
        rows, out = [arrays.holding(host) for host in hosts], arrays.empty((case.size,))
        cells = arrays.holding(np.full((ranks, stride), 7))
        call, marks = arrays.holding(np.zeros(32, np.int64)), arrays.holding(np.zeros(ranks, np.int64))
        marks[other], call[MARKS] = asleep, marks.ctypes.data
        cells[:, 0], cells[own, 0], cells[other, 0] = number + 2, number, number + reached
        board = cells[:, 1 + 2 * ((number + 1) % 2) :]
        board[:, 0], board[:, 1] = 5, arrived
        board[other, 0] += state == DIFFERENT
        call[[TAG, ARRIVED_NS, POLLS, RANK, STRIDE]] = 5, arrived[own], 3, own, stride
        with _some_launched(case):
            _run(DeviceFold(device).with_rendezvous(rows, out, case.divisor, slice(*ends), cells, call))
        arrays.check()
        assert call[STATE] == state
        has_summed = state in (COMPLETE, NOT_LEFT)
        assert cells[own, 0] == number + 1 + has_summed
        assert board[own, :2].tolist() == [5, arrived[own]]
        inside = slice(*ends) if has_summed else slice(0, 0)
        if out[inside].size:
            assert_near(out[inside], total[inside], "meet_and_fold", 1e-6)
        assert np.isnan(np.delete(out, np.r_[inside])).all(), "it wrote outside its part"
        if state != NOT_MET:
            last_rank, late_s = last_of(arrived)
            noted = call[[WAITED_NS, LAST_RANK, LATE_NS]].tolist()
            assert noted == [max(arrived) - arrived[own], last_rank, round(late_s * 1e9)]


def check_work_queue(device: Device, case: Case) -> None:
    """Compare an all-reduce whose parts are for whoever comes, for each way in which the others can stand.

    The other ranks, which this one plays, have taken and summed some parts before it, and may sleep.
    """
    ranks, stride = 2 + case.rows % (MOST_ROWS - 1), 5 + case.seed % 40
    hosts = [whole_numbers(case.seed + row, case.size) for row in range(ranks)]
    total = np.sum(hosts, 0, dtype=np.float64) / case.divisor
    own, other, number = case.seed % ranks, (case.seed + 1) % ranks, case.seed // 7 + 1
    part = 1 + case.seed % case.size
    parts = -(-case.size // part)
    taken = case.seed // 3 % (parts + 1)
    summed = case.seed // 5 % (taken + 1)
    for arrived, differs, asleep, begun in itertools.product((False, True), repeat=4):
        arrays = Arrays()
        rows, out = [arrays.holding(host) for host in hosts], arrays.empty((case.size,))
        cells, claims = arrays.holding(np.full((ranks, stride), 7)), arrays.holding(np.zeros(8, np.int64))
        marks, call = arrays.holding(np.zeros(ranks, np.int64)), arrays.holding(np.zeros(32, np.int64))
        cells[:, 0], cells[own, 0], cells[other, 0] = number, number - 1, number - (not arrived)
        board = cells[:, 1 + 2 * (number % 2) :]
        board[:, 0], board[:, 1] = 5, 100
        board[other, 0] += differs
        marks[other] = asleep
        # Of this rendezvous, or what an earlier one has left.
        claims[:2] = [number << 16 | taken, number << 16 | summed] if begun else [number - 1 << 16 | 3] * 2
        call[[TAG, ARRIVED_NS, POLLS, RANK, STRIDE, PART]] = 5, 100, case.seed % 4, own, stride, part
        call[[CLAIMS, MARKS]] = claims.ctypes.data, marks.ctypes.data
        with _some_launched(case):
            run = DeviceFold(device).with_rendezvous(
                rows, out, case.divisor, slice(0, case.size), cells, call, shares=True
            )
        _run(run)
        state = call[STATE]
        assert cells[own, 0] == number
        if arrived and not differs and asleep:
            assert (state, np.isnan(out).all()) == (SLEEPERS, True), "it summed before the others were woken"
            call[RESUMES] = 1
            _run(run)
            assert cells[own, 0] == number, "it came to the rendezvous twice"
        arrays.check()
        mine = slice(taken * part if begun else 0, case.size) if arrived and not differs else slice(0, 0)
        assert np.isnan(np.delete(out, np.r_[mine])).all(), "it summed what others have taken"
        if out[mine].size:
            assert_near(out[mine], total[mine], "meet_and_share", 1e-6)
        if not arrived or differs:
            assert state == (DIFFERENT if arrived else NOT_MET)
            continue
        done = parts - taken + summed if begun else parts
        assert claims[:2].tolist() == [number << 16 | parts, number << 16 | done]
        assert call[STATE] == (NOT_LEFT if done < parts else SLEEPERS if asleep else COMPLETE)


def _to_bfloat16(host: np.ndarray) -> np.ndarray:
    halves = np.empty(host.shape, BFLOAT16)
    halves[...] = to_bfloat16(host)
    return halves


def _run(work: Any) -> None:
    assert work is not None, "the device took an array that it cannot use"
    work()


def check_coding(device: Device, case: Case) -> None:
    """Compare coded values, residuals and means with NumPy's codings."""
    ranks, chosen = 1 + case.rows % 4, 1 + case.seed % case.size
    rng = np.random.default_rng(case.seed)
    hosts = [(rng.standard_normal(case.size) * 10.0 ** rng.integers(-6, 6)).astype(np.float32) for _ in range(ranks)]
    for name in ("halves", "bfloat16", "chars", "largest"):
        sides = []
        for coding in (Coding(DeviceCodec(device)), Coding(None)):
            arrays = Arrays()
            sides.append(_coded(coding, arrays, name, hosts, case.divisor, chosen))
            arrays.check()
        for mine, numpys in zip(*sides, strict=True):
            assert mine.tobytes() == numpys.tobytes(), name


def _coded(
    coding: Coding, arrays: Arrays, name: str, hosts: list[np.ndarray], divisor: int, chosen: int
) -> list[np.ndarray]:
    """Return all that a coding writes."""
    size, values = hosts[0].size, [arrays.holding(host) for host in hosts]
    out = arrays.empty((size,))
    if name in ("halves", "bfloat16"):
        halves = arrays.empty((size,), np.float16 if name == "halves" else BFLOAT16)
        getattr(coding, f"to_{name}")(values[0], halves, divisor)()
        getattr(coding, f"from_{name}")(halves, out)()
        return [halves, out]
    nbytes = chars_nbytes(size) if name == "chars" else largest_nbytes(chosen, np.dtype(np.float32))
    rows, residual = arrays.empty((len(hosts), nbytes), np.uint8), arrays.holding(np.zeros(size, np.float32))
    mean = getattr(coding, f"mean_of_{name}")(rows, out)  # prepared before any rank has sent anything
    for rank, each in enumerate(values):
        getattr(coding, f"to_{name}")(each, residual, rows, rank)()
    mean()
    return [rows, residual, out]


def check_factors(device: Device, case: Case) -> None:
    """Compare products with thin factors."""
    rows, columns, rank = 1 + case.size % 37, 1 + case.size // 9, 1 + case.rows % 5
    arrays, codec = Arrays(), DeviceCodec(device)
    shapes = ((rows, columns), (rank, rows), (rank, columns))
    matrix, first, second = (arrays.holding(whole_numbers(case.seed + n, *shape)) for n, shape in enumerate(shapes))
    thin, other, product = arrays.empty((rank, rows)), arrays.empty((rank, columns)), arrays.empty((rows, columns))
    _run(codec.times(matrix, second, thin))
    _run(codec.transposed_times(matrix, first, other))
    _run(codec.outer(first, second, product))
    assert_equal(thin, second.astype(np.float64) @ matrix.T, "times")
    assert_equal(other, first.astype(np.float64) @ matrix, "transposed_times")
    assert_equal(product, first.T.astype(np.float64) @ second, "outer")
    arrays.check()


def check_hash(device: Device, case: Case) -> None:
    """Compare the hash with the host's."""
    data = np.random.default_rng(case.seed).integers(0, 256, 8 * case.size * case.rows, np.uint8)
    assert hash_buffer(device, device.upload(data), data.size) == hash_words(data)


def check_gather(device: Device, case: Case) -> None:
    """Compare chosen images, scaled and shifted, with NumPy's, bit by bit; with a scale for each channel or for all."""
    rng, arrays = np.random.default_rng(case.seed), Arrays()
    samples, channels, count = case.rows, 1 + case.divisor % 3, 1 + case.size % 5
    pixels = arrays.holding(rng.integers(0, 256, (samples, channels, 3, 1 + case.size % 17)).astype(np.uint8))
    planes = (channels, 1, 1) if case.seed % 2 else ()
    scale, shift = rng.standard_normal((2, *planes)).astype(np.float32)
    out, chosen = arrays.empty((count, *pixels.shape[1:])), rng.integers(-samples, samples, count)
    gather = DeviceGather(device)(pixels, np.asarray(scale), np.asarray(shift), out)
    assert gather is not None
    gather(chosen)
    assert out.tobytes() == (pixels[chosen].astype(np.float32) * scale + shift).tobytes()
    arrays.check()


FOLD = Family("fold", drawn(draw), check_fold, ("cpu",))
RENDEZVOUS = Family("rendezvous", drawn(draw), check_rendezvous, ("cpu",))
SHARED_WORK = Family("shared work", drawn(draw), check_work_queue, ("cpu",), in_caller=True)
CODING = Family("coding", drawn(draw), check_coding, ("cpu",))
FACTORS = Family("factors", drawn(draw), check_factors, ("cpu",))
HASH = Family("hash", drawn(draw), check_hash)
GATHER = Family("gather", drawn(draw), check_gather, ("cpu",))
