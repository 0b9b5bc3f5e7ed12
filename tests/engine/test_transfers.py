"""Copies to and from a device with memory of its own: in order with its kernels, and while these wait.

A user event holds the kernels' queue up, so that what goes on meanwhile is seen without a clock. On a GPU a kernel
does so that turns until the host writes to its memory, since NVIDIA's driver (580.159) ends in a segmentation fault
once a user event is complete that commands wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine import memory as transfers
from clcomm.engine.device import Device
from clcomm.engine.launch_queue import QueueMark
from clcomm.engine.tensor import empty

PIECE = 4096


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, device: Device) -> Device:
    """A device with memory of its own, and few, small pieces on the way."""
    monkeypatch.setattr(transfers, "PIECE_NBYTES", PIECE)
    monkeypatch.setattr(transfers, "MOST_PIECES", 3)
    made = Device(device.cl_device, kind="gpu")
    assert not made.shares_host_memory
    return made


@contextmanager
def held_up(device: Device) -> Iterator[None]:
    """Let nothing that is queued from here on start before the block ends."""
    import pyopencl as cl

    if device.cl_device.type & cl.device_type.GPU:
        with turning(device):
            yield
        return
    gate = cl.UserEvent(device.context)
    cl.enqueue_barrier(device.queue, wait_for=[gate])
    device.queue.flush()
    try:
        yield
    finally:
        gate.set_status(cl.command_execution_status.COMPLETE)
        device.finish()


TURN = """
__kernel void turn(volatile __global int *gate, ulong most)
{
    for (ulong turns = 0; turns < most && !gate[0]; turns++)
        ;
}
"""


@contextmanager
def turning(device: Device) -> Iterator[None]:
    """Let a kernel turn until the block ends, or for some seconds."""
    import pyopencl as cl

    pinned = cl.Buffer(device.context, cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR, 4)
    aside = cl.CommandQueue(device.context)
    gate, _ = cl.enqueue_map_buffer(aside, pinned, cl.map_flags.WRITE, 0, (1,), np.int32)
    gate[0] = 0
    turn = cl.Program(device.context, TURN).build().turn
    turn(device.queue, (1,), (1,), pinned, np.uint64(1 << 23))
    device.queue.flush()
    try:
        yield
    finally:
        gate[0] = 1
        device.finish()


def numbers(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


SIZES = sorted({1, *(pieces * PIECE // 4 + more for pieces in (1, 2, 3, 7) for more in (-1, 0, 1))})


@pytest.mark.parametrize("count", SIZES)
def test_values_arrive_whole_though_the_array_changes_at_once(apart: Device, count: int) -> None:
    tensors, hosts = [], [numbers(seed, count) for seed in range(4)]
    for host in hosts:
        given = host.copy()
        tensors.append(Tensor(given, apart))
        given[...] = np.nan
    for tensor, host in zip(tensors, hosts, strict=True):
        assert tensor.numpy().tobytes() == host.tobytes()


@pytest.mark.parametrize("count", SIZES)
def test_a_range_is_written_and_nothing_beside_it(apart: Device, count: int) -> None:
    whole = numbers(0, count + 20)
    tensor, part = Tensor(whole, apart), numbers(1, count)
    apart.write(tensor.buffer, part, 4 * 7)
    expected = whole.copy()
    expected[7 : 7 + count] = part
    assert tensor.numpy().tobytes() == expected.tobytes()


def test_a_kernel_has_the_values_of_its_place_in_the_queue(apart: Device) -> None:
    count = 2 * PIECE
    hosts = [numbers(seed, count) for seed in range(6)]
    x, results = Tensor(hosts[0], apart), []
    for host in hosts[1:]:
        results.append(x * 2.0)
        apart.write(x.buffer, host)
    for result, host in zip(results, hosts, strict=False):
        assert result.numpy().tobytes() == (host * 2).tobytes()


def test_memory_that_a_queued_kernel_reads_is_not_overwritten(apart: Device) -> None:
    results, hosts = [], [numbers(seed, PIECE) for seed in range(8)]
    for host in hosts:
        x = Tensor(host, apart)
        results.append(x + 1.0)
        del x  # its memory is the next one's
    for result, host in zip(results, hosts, strict=True):
        assert result.numpy().tobytes() == (host + np.float32(1)).tobytes()


def test_values_come_to_the_device_while_its_kernels_wait(apart: Device) -> None:
    host = numbers(0, PIECE // 2)
    with held_up(apart):
        tensor = Tensor(host, apart)  # two pieces
        for piece in apart.transfers._pieces:
            piece.sent.wait()
            assert piece.placed[0].command_execution_status != 0  # not complete: that waits for the kernels
    assert tensor.numpy().tobytes() == host.tobytes()


@pytest.mark.parametrize("count", SIZES)
def test_values_before_a_mark_come_to_the_host_while_kernels_after_it_wait(apart: Device, count: int) -> None:
    host, got = numbers(0, count), np.empty(count - count // 3, np.float32)
    x = Tensor(host, apart)
    doubled = x * 2.0
    mark = QueueMark(apart)
    with held_up(apart):
        later = doubled * 2.0
        mark.read(doubled.buffer, got, 4 * (count // 3))
        assert got.tobytes() == (host[count // 3 :] * 2).tobytes()
    assert later.numpy().tobytes() == (host * 4).tobytes()


def test_an_array_with_gaps_is_refused(apart: Device) -> None:
    x = Tensor(numbers(0, 8), apart)
    with pytest.raises(ArgumentError, match=r"array: expected a C-contiguous one, got strides \(8,\) of shape \(4,\)"):
        QueueMark(apart).read(x.buffer, np.empty(8, np.float32)[::2], 0)


def test_threads_bring_values_at_once(apart: Device) -> None:
    found: dict[int, bool] = {}

    def bring(number: int) -> None:
        pairs = [(numbers(100 * number + i, PIECE + i), i) for i in range(20)]
        tensors = [Tensor(host, apart) for host, _ in pairs]
        back = [np.empty(host.size, np.float32) for host, _ in pairs]
        for tensor, array in zip(tensors, back, strict=True):
            QueueMark(apart).read(tensor.buffer, array, 0)
        found[number] = all(a.tobytes() == host.tobytes() for a, (host, _) in zip(back, pairs, strict=True))

    threads = [threading.Thread(target=bring, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), True)


def test_a_device_that_shares_the_hosts_memory_needs_no_pieces(device: Device) -> None:
    if device.shares_host_memory:
        made = Device(device.cl_device)
        Tensor(numbers(0, 10), made).numpy()
        made.write(empty(made, (10,)).buffer, numbers(1, 10))
        assert "transfers" not in vars(made)
