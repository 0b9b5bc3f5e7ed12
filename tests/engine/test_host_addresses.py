"""Prepared launches that take addresses in place of buffers: whose memory they are, and the bits of a replay.

Where the device under test takes none, the same tests run in another process on PoCL's driver without worker threads.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from clcomm.engine import Replay, Tensor, host_addresses, program
from clcomm.engine import functional as F
from clcomm.engine.tensor import wrap
from tests.calling_thread import pass_in_the_calling_thread
from tests.engine.twin import Twin

COUNT = 1000
KINDS = ("own", "copy", "host", "pooled", "part")


def buffer_of(device, kind):
    """Return a buffer of COUNT floats, and the array under it, if there is one."""
    memory, array = device.memory, np.zeros(COUNT + 32, np.float32)
    array = array[-array.ctypes.data % 128 // 4 :][:COUNT]
    if kind == "own":
        return memory.exact(4 * COUNT), None
    if kind == "copy":
        return memory.exact(copy_of=array), None
    if kind == "host":
        return memory.exact(on_top_of=array), array
    if kind == "pooled":
        return memory.allocate(4 * COUNT), None
    return memory.exact(3 * 4096 + 4 * COUNT).get_sub_region(4096, 4 * COUNT), None


def values_of(device, buffer):
    found = np.empty(COUNT, np.float32)
    device.read(buffer, found)
    return found


@pytest.fixture
def direct(device):
    """The device under test, which takes addresses."""
    if not device.takes_addresses:
        pytest.skip("takes buffers alone; see test_on_the_driver_that_takes_addresses")
    return device


@pytest.mark.parametrize("kind", KINDS)
def test_an_address_is_that_of_the_buffers_memory(direct, kind):
    buffer, array = buffer_of(direct, kind)
    values = np.random.default_rng(0).standard_normal(COUNT, np.float32)
    direct.write(buffer, values)
    argument = host_addresses.argument(direct, buffer)
    assert argument.mem.nbytes == buffer.size
    address = argument.mem.ctypes.data
    assert array is None or array.ctypes.data == address
    there = np.frombuffer((ctypes.c_char * (4 * COUNT)).from_address(address), np.float32)
    np.testing.assert_array_equal(there, values)
    there += 1.0
    np.testing.assert_array_equal(values_of(direct, buffer), values + 1.0)
    assert host_addresses.argument(direct, buffer).mem.ctypes.data == address, "for as long as it lives"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_takes_addresses_and_buffers_by_turns(direct, kind):
    """As kernel objects do that one recording leaves to the next."""
    rng = np.random.default_rng(1)
    kernel, added = direct.kernel("elementwise", "add"), None
    for turn in range(8):
        buffers = [buffer_of(direct, kind)[0] for _ in range(3)]
        values = [rng.standard_normal(COUNT, np.float32) for _ in range(2)]
        for buffer, each in zip(buffers[:2], values, strict=True):
            direct.write(buffer, each)
        x, y, out = [  # each of the three alternates in its own way
            host_addresses.argument(direct, buffer) if turn >> place & 1 else buffer
            for place, buffer in enumerate(buffers)
        ]
        added = program.bound_copy(kernel, [out, x, y, COUNT], [added] if added else None)
        direct.launch_all([(added, *direct.grid(COUNT))])
        np.testing.assert_array_equal(values_of(direct, buffers[2]), values[0] + values[1])


def test_a_replay_gives_the_bits_of_the_function_whatever_memory_it_uses(direct):
    kept = []
    for kind in KINDS:
        buffer, _ = buffer_of(direct, kind)
        direct.write(buffer, np.random.default_rng(2).standard_normal(COUNT, np.float32))
        kept.append(wrap(direct, buffer, (COUNT,), np.dtype(np.float32)))

    def function(x):
        inner = x
        for each in kept:
            inner = F.add(F.mul(inner, each), x)
        return inner, F.mul(inner, inner)

    replay = Replay(function, check_every=7)
    for number in range(20):
        x = Tensor(np.random.default_rng(number).standard_normal(COUNT, np.float32), direct)
        for mine, plain in zip(replay(x), function(x), strict=True):
            assert mine.numpy().tobytes() == plain.numpy().tobytes()
        direct.write(
            kept[number % len(KINDS)].buffer, np.random.default_rng(-number - 1 + 99).random(COUNT, np.float32)
        )
    assert replay.refusal is None and replay.replayed >= 14


def test_training_replayed_with_addresses_has_the_bits_of_the_plain_loop(direct, monkeypatch):
    taken, argument = [], host_addresses.argument
    monkeypatch.setattr(host_addresses, "argument", lambda *args: taken.append(args) or argument(*args))
    twin = Twin(direct)
    for size in [8, 8, 8, 5] * 5:
        twin.step(size)
        twin.update()
    twin.assert_same_parameters()
    assert taken, "recordings were bound"


def test_other_devices_and_values_are_left_as_they_are(device, monkeypatch):
    monkeypatch.setattr(device, "takes_addresses", False)
    buffer, number = device.memory.exact(4), np.int32(3)
    assert host_addresses.argument(device, buffer) is host_addresses.kept_argument(device, buffer) is buffer
    assert buffer.argument is None, "a buffer that refers to itself outlives its last use"
    monkeypatch.setattr(device, "takes_addresses", True)
    assert host_addresses.argument(device, number) is number


def test_small_results_have_places_of_their_own(direct):
    """A result's place is used again only once nothing refers to it, and `item` reads it where the kernel wrote it."""
    replay = Replay(lambda x: (x.sum(), (x * 2.0).sum()))
    inputs = [Tensor(np.full(8, turn, np.float32), direct) for turn in range(12)]
    expected = [(8.0 * turn, 16.0 * turn) for turn in range(12)]
    kept = [replay(x) for x in inputs]  # more than there are places
    assert replay.replayed > 8
    assert [tuple(each.item() for each in results) for results in kept] == expected
    assert [tuple(float(each.numpy()) for each in results) for results in kept] == expected
    part, places = kept[-1][0].detach(), {id(each.buffer) for results in kept[3:7] for each in results}
    elsewhere = 0
    del kept
    for x, values in zip(inputs, expected, strict=True):
        results = replay(x)
        assert tuple(each.item() for each in results) == values
        elsewhere += not {id(each.buffer) for each in results} <= places
    assert elsewhere == 1, "a new place beside free ones; the run that is checked has pooled memory"
    assert part.item() == expected[-1][0], "a tensor on the same memory keeps its place"


def test_a_recording_follows_its_inputs_addresses(direct):
    """Inputs that come again in turns, new ones at the memory of released ones, and pooled ones."""
    replay = Replay(lambda x, y: (x + y).sum())
    again = [Tensor(np.full(8, turn, np.float32), direct) for turn in range(3)]
    for turn in range(24):
        new = Tensor(np.full(8, 10.0 * turn, np.float32), direct)
        x = again[turn % 3] if turn % 4 else again[turn % 3] * 1.0
        assert replay(x, new).item() == 8 * (turn % 3 + 10 * turn)
    assert replay.replayed > 15


def test_on_the_driver_that_takes_addresses(device):
    if device.takes_addresses:
        pytest.skip("the tests above run here")
    pass_in_the_calling_thread(device, __file__, "not as-gpu and not driver")
