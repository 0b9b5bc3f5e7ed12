"""A timeline as Chakra execution traces, a graph of nodes for each rank that simulators of clusters replay.

The schema is MLCommons', et_def.proto of version 0.0.4 (https://github.com/mlcommons/chakra), in protobuf's encoding
(https://protobuf.dev/programming-guides/encoding): each message behind its length. A rank's stretches of computing are
nodes in a row, cut where a collective begins or ends; a collective depends on the collective and on the stretch before
it, and a stretch on the collectives that it waited for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from clcomm.storage.files import replacing
from clcomm.trace.timeline import Span, Timeline, collectives

VERSION = "0.0.4"
#: NodeType, and CollectiveCommType by the operation's name.
_COMPUTING, _SENDING, _RECEIVING, _COLLECTIVE = 4, 5, 6, 7
_COLLECTIVES = {
    "all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5, "all_to_all": 6,
    "reduce_scatter": 7, "barrier": 9, "rendezvous": 9,
}  # fmt: skip
#: Phases in which a rank computes or fetches data, and of them those that need all reduced gradients.
_COMPUTED = ("data", "forward_backward", "forward", "backward", "loss", "clipping", "optimizer", "evaluate")
_AFTER_ALL = ("clipping", "optimizer")
_VARINT, _BYTES = 0, 2


def write_chakra(ranks: Sequence[Timeline], folder: Path) -> list[Path]:
    """Write `rank.N.et` for each rank into a folder, which is made; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"rank.{one.rank}.et" for one in ranks]
    for one, path in zip(ranks, paths, strict=True):
        with replacing(path) as file:
            file.write(b"".join(_delimited(each) for each in (_field(1, VERSION), *nodes_of(one))))
    return paths


def nodes_of(one: Timeline) -> Iterator[bytes]:
    """Yield a rank's nodes as encoded messages, earliest first."""
    calls = list(collectives(one))
    cuts = sorted({edge for call in calls for edge in (call.begin_ns, call.end_ns)})
    pieces = [piece for span in one.spans if span.name in _COMPUTED and "sequence" not in span.args
              for piece in _cut(span, cuts)]  # fmt: skip
    last_call = last_piece = 0  # numbers of nodes begin at 1
    ended: list[tuple[int, int, bool]] = []  # collectives since the last stretch: end, number, whether in background
    for number, span in enumerate(sorted([*pieces, *calls], key=lambda span: span.begin_ns), 1):
        if "sequence" in span.args:
            needed = [each for each in (last_call, last_piece) if each]
            hidden = any(piece.begin_ns < span.end_ns and span.begin_ns < piece.end_ns for piece in pieces)
            ended.append((span.end_ns, number, hidden))
            last_call = number
        else:
            waited = [each for each in ended if each[0] <= span.begin_ns and (not each[2] or span.name in _AFTER_ALL)]
            ended = [each for each in ended if each not in waited]
            needed = [*([last_piece] if last_piece else []), *(each[1] for each in waited)]
            last_piece = number
        yield _node(number, span, needed)


def _cut(span: Span, cuts: Sequence[int]) -> Iterator[Span]:
    """Yield a stretch in pieces, cut where a collective begins or ends."""
    edges = [span.begin_ns, *(cut for cut in cuts if span.begin_ns < cut < span.end_ns), span.end_ns]
    for begin_ns, end_ns in itertools.pairwise(edges):
        yield span._replace(begin_ns=begin_ns, end_ns=end_ns)


def _node(number: int, span: Span, needed: Sequence[int]) -> bytes:
    operation = span.name.split()[0].removesuffix("_init").removesuffix("_object")
    kind, attributes = _COMPUTING, [_attribute("is_cpu_op", 27, 1)]
    if "sequence" in span.args:
        kind = {"send": _SENDING, "recv": _RECEIVING}.get(operation, _COLLECTIVE)
        attributes += [_attribute("comm_size", 9, int(span.args.get("bytes", 0))),
                       _attribute("comm_type", 9, _COLLECTIVES.get(operation, _COLLECTIVES["barrier"])),
                       _attribute("label", 29, str(span.args.get("label", "")))]  # fmt: skip
    begin_us, end_us = round(span.begin_ns / 1000), round(span.end_ns / 1000)
    fields = [_field(1, number), _field(2, span.name), _field(3, kind)]
    fields += [_field(5, b"".join(map(_varint, needed)))] if needed else []
    return b"".join([*fields, _field(6, begin_us), _field(7, end_us - begin_us), *(_field(10, a) for a in attributes)])


def _attribute(name: str, field: int, value: int | str) -> bytes:
    """Return an AttributeProto; `field` is that of the value's type: 9 int64, 27 bool, 29 string."""
    return _field(1, name) + _field(field, value)


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _delimited(data)


def _delimited(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Return a whole number from 0 up in seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
