"""The relay of kernels without netem: what happens to the packets of one direction, by a clock of the test's own."""

from __future__ import annotations

import socket

import pytest

from tests.multihost.slow_cable import Direction


@pytest.fixture
def ends():
    """What packets are sent by, a direction's source and target, and what they arrive at."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    (sender, source), (target, receiver) = pairs
    for each in (sender, source, target, receiver):
        each.setblocking(False)
    yield sender, source.fileno(), target.fileno(), receiver
    for each in (sender, source, target, receiver):
        each.close()


def test_packets_are_late_by_the_jitter_at_most_and_some_are_lost(ends):
    sender, source, target, receiver = ends
    direction, delays_s = Direction(source, target, 0.05, 0.0, 0.01, 0.25), list[float]()
    for now_s in range(200):
        packet = now_s.to_bytes(2, "big")
        sender.send(packet)
        direction.take(now_s)
        if direction.next_s < float("inf"):
            delays_s.append(direction.next_s - now_s)
            direction.deliver(direction.next_s)
            assert receiver.recv(9) == packet
    assert 120 < len(delays_s) < 180
    assert 0.04 - 1e-9 <= min(delays_s) < 0.042 and 0.058 < max(delays_s) <= 0.06 + 1e-9


def test_packets_keep_their_order_and_share_the_rate(ends):
    sender, source, target, receiver = ends
    direction = Direction(source, target, 0.05, 1000.0, 0.05, 0.0)  # 20 ms for each of 20 bytes
    for number in range(8):
        sender.send(bytes([number]) * 20)
        direction.take(0.0)
    direction.deliver(0.02 - 1e-9)  # the first is still being sent
    with pytest.raises(BlockingIOError):
        receiver.recv(99)
    direction.deliver(8 * 0.02 + 0.1)
    assert [receiver.recv(99)[0] for _ in range(8)] == list(range(8))
