"""Hostile files out of good ones: cut, flipped, overwritten, doubled, spliced, or random from the start."""

from __future__ import annotations

import random

#: Numbers at the edges of what fields hold, in both byte orders, and text that parsers trip over.
_EDGES = [value.to_bytes(size, order) for size in (1, 2, 4, 8) for order in ("little", "big") for value in
          (0, 1, (1 << 8 * size - 1) - 1, 1 << 8 * size - 1, (1 << 8 * size) - 1)]  # fmt: skip
_TEXTS = [b"NaN", b"1e999", b"-1", b'""', b"null", b"[" * 2000, b"{}", b"\\ud800", b"\xff\xfe", b"\0", b"9" * 400]


def mutated(good: bytes, draw: random.Random) -> bytes:
    """Return a file that differs from a good one by a few mutations, or has nothing to do with it."""
    data = bytearray(good)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        _WAYS[draw.randrange(len(_WAYS))](data, draw)
    return bytes(data)


def _place(data: bytearray, draw: random.Random) -> int:
    """Return a position, often near the start or the end, where formats keep their structure."""
    near = draw.choice((len(data), 64, 64, len(data)))
    place = draw.randrange(min(near, len(data)) + 1)
    return len(data) - place if draw.random() < 0.3 else place


def _cut(data: bytearray, draw: random.Random) -> None:
    del data[_place(data, draw) :]


def _flip(data: bytearray, draw: random.Random) -> None:
    if data:
        data[min(_place(data, draw), len(data) - 1)] ^= 1 << draw.randrange(8)


def _overwrite(data: bytearray, draw: random.Random) -> None:
    place, edge = _place(data, draw), draw.choice(_EDGES)
    data[place : place + len(edge)] = edge


def _insert(data: bytearray, draw: random.Random) -> None:
    place = _place(data, draw)
    data[place:place] = draw.choice((*_EDGES, *_TEXTS))


def _replace_word(data: bytearray, draw: random.Random) -> None:
    place = _place(data, draw)
    data[place : place + draw.randrange(1, 12)] = draw.choice(_TEXTS)


def _remove(data: bytearray, draw: random.Random) -> None:
    place = _place(data, draw)
    del data[place : place + draw.randrange(1, 64)]


def _double(data: bytearray, draw: random.Random) -> None:
    start, stop = sorted((_place(data, draw), _place(data, draw)))
    data[start:start] = data[start : min(stop, start + 4096)]


def _forget(data: bytearray, draw: random.Random) -> None:
    data[:] = draw.randbytes(draw.randrange(200))


_WAYS = (_cut, _flip, _flip, _overwrite, _overwrite, _insert, _replace_word, _remove, _double, _forget)
