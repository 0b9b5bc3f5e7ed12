"""Timelines in other formats, read back by the formats' own tools.

    python -m tests.proofs.traces run.json.gz --chakra CLONE

writes a file of --trace as Chakra execution traces and as an OTF2 archive, reads the traces with the jsonizer of a
clone of https://github.com/mlcommons/chakra, with protobuf, and the archive with `otf2.reader`, and compares names,
times, bytes and dependencies with the file. The clone needs schema/protobuf/et_def_pb2.py, which protoc makes of
et_def.proto.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from clcomm.trace.chakra import write_chakra
from clcomm.trace.otf2_archive import write_otf2
from clcomm.trace.timeline import collectives, read_timeline

KINDS = {4: "COMP_NODE", 5: "COMM_SEND_NODE", 6: "COMM_RECV_NODE", 7: "COMM_COLL_NODE"}
CALLS = {0: "ALL_REDUCE", 1: "REDUCE", 2: "ALL_GATHER", 5: "BROADCAST", 7: "REDUCE_SCATTER", 9: "BARRIER"}


class Node(NamedTuple):
    """A node of an execution trace; nbytes and call: of a collective."""

    number: int
    name: str
    kind: str
    needed: tuple[int, ...]
    begin_us: int
    us: int
    nbytes: int | None
    call: str | None


def chakra_nodes(path: Path) -> tuple[str, list[Node]]:
    """Return the version and the nodes of an execution trace, decoded by the rules of protobuf's encoding."""
    data, found, version = path.read_bytes(), [], ""
    at, first = 0, True
    while at < len(data):
        length, at = _number(data, at)
        fields = _fields(data[at : at + length])
        at += length
        if first:
            version, first = b"".join(fields.get(1, [])).decode(), False
            continue
        attributes = {}
        for one in map(_fields, fields.get(10, [])):
            attributes[one[1][0].decode()] = next(value[0] for name, value in one.items() if name != 1)
        needed, packed = [], b"".join(fields.get(5, []))
        place = 0
        while place < len(packed):
            number, place = _number(packed, place)
            needed.append(number)
        number, kind, begin_us, us = (fields.get(field, [0])[0] for field in (1, 3, 6, 7))
        call = CALLS.get(attributes["comm_type"]) if "comm_type" in attributes else None
        found.append(Node(number, fields[2][0].decode(), KINDS[kind], tuple(needed), begin_us, us,
                          attributes.get("comm_size"), call))  # fmt: skip
    return version, found


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def _fields(data: bytes) -> dict[int, list]:
    found: dict[int, list] = {}
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        value, at = _number(data, at)
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
        found.setdefault(key >> 3, []).append(value)
    return found


def otf2_spans(anchor: Path) -> list[tuple]:
    """Return (rank, region, begin, end, bytes) of an archive's slices, as otf2.reader has them."""
    import otf2

    open_, found = {}, []
    with otf2.reader.open(str(anchor)) as archive:
        for location, each in archive.events:
            stack = open_.setdefault(location, [])
            if isinstance(each, otf2.events.Enter):
                given = {name.name: value for name, value in (each.attributes or {}).items()}
                stack.append((each.region.name, each.time, given.get("bytes")))
            else:
                name, begin_ns, nbytes = stack.pop()
                found.append((int(location.group.name.split()[1]), name, begin_ns, each.time, nbytes))
    return sorted(found, key=lambda span: span[:4])


def jsonized(clone: Path, path: Path) -> list[dict]:
    """Return the nodes that Chakra's jsonizer finds in an execution trace."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "chakra").symlink_to(clone.resolve())
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "chakra.src.jsonizer.jsonizer", "--input_filename", str(path)]
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        subprocess.run([*command, "--output_filename", str(out)], cwd=folder, env=environment, check=True)
        text, at, found = out.read_text(), 0, []
    while at < len(text):
        one, at = json.JSONDecoder().raw_decode(text, at)
        found.append(one)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.traces")
    parser.add_argument("file", type=Path)
    parser.add_argument("--chakra", type=Path, required=True)
    options = parser.parse_args()
    ranks = read_timeline(options.file)
    with tempfile.TemporaryDirectory() as folder:
        for one, path in zip(ranks, write_chakra(ranks, Path(folder, "et")), strict=True):
            _, nodes = chakra_nodes(path)
            theirs = jsonized(options.chakra, path)
            assert [(int(n["id"]), n["name"], n["type"], tuple(map(int, n.get("dataDeps", []))),
                     int(n.get("startTimeMicros", 0)), int(n.get("durationMicros", 0))) for n in theirs] == [
                n[:6] for n in nodes
            ], path  # fmt: skip
            assert all(each < n.number for n in nodes for each in n.needed)
            calls = [n for n in nodes if n.nbytes is not None]
            assert [n.nbytes for n in calls] == [int(c.args.get("bytes", 0)) for c in collectives(one)]
            print(f"rank {one.rank}: Chakra's jsonizer has {len(nodes)} nodes, {len(calls)} of collectives, all alike")
        found = otf2_spans(write_otf2(ranks, Path(folder, "otf2"))[0])
        ours = sorted((one.rank, span.name, span.begin_ns, span.end_ns) for one in ranks for span in one.spans)
        alike = sum(mine == theirs[:4] for mine, theirs in zip(ours, found, strict=True))
        print(f"otf2.reader has {len(found)} slices of {len(ranks)} ranks, {alike} with the same ns")


if __name__ == "__main__":
    main()
