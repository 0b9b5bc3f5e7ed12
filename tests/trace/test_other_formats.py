"""`clcomm trace --to`: timelines as Chakra execution traces and OTF2 archives, read back by the formats' libraries."""

from __future__ import annotations

import gzip
import json

import pytest

from clcomm import cli
from clcomm.errors import ArgumentError, DataError
from clcomm.trace.chakra import nodes_of
from clcomm.trace.events import FIRST_PID
from clcomm.trace.otf2_archive import edges
from clcomm.trace.timeline import Span, Timeline, read_timeline
from tests.proofs.traces import Node, chakra_nodes, otf2_spans

STEPS, COMMUNICATION = 100_000, 100_010


def event(rank: int, thread: int, begin_us: float, us: float, name: str, category: str = "phase", **args) -> dict:
    return {"ph": "X", "pid": FIRST_PID + rank, "tid": thread + 100 * rank, "ts": begin_us, "dur": us, "name": name,
            "cat": category, "args": args}  # fmt: skip


def events(rank: int) -> list[dict]:
    """Return a step with a background all-reduce, one that follows backward, and the optimizer."""
    call = {"category": "communication", "label": "gradients", "transport": "shared"}
    name = {"ph": "M", "pid": FIRST_PID + rank, "tid": STEPS + 100 * rank, "name": "thread_name"}
    return [
        {**name, "args": {"name": "steps"}},
        event(rank, STEPS, 0, 1000.5, "step", step=1),
        event(rank, STEPS, 0, 500, "forward_backward", step=1),
        event(rank, COMMUNICATION, 200, 100, "all_reduce bucket 0", **call, bytes=4096, sequence=1, bucket=0),
        event(rank, COMMUNICATION, 220, 30, "wait", "communication"),
        event(rank, COMMUNICATION, 510, 90, "all_reduce bucket 1", **call, bytes=512, sequence=2, bucket=1),
        event(rank, STEPS, 600, 400, "optimizer", step=1),
    ]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "run.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events(1) + events(0)}, file)
    return path


def test_a_rank_is_a_graph_of_nodes(trace, tmp_path, capsys):
    assert cli.main(["trace", str(trace), "--to", "chakra", "-o", str(tmp_path / "et")]) == 0
    assert "rank.1.et: written from " in capsys.readouterr().out
    version, nodes = chakra_nodes(tmp_path / "et" / "rank.1.et")
    assert version == "0.0.4" and nodes == [
        Node(1, "forward_backward", "COMP_NODE", (), 0, 200, None, None),
        Node(2, "forward_backward", "COMP_NODE", (1,), 200, 100, None, None),
        Node(3, "all_reduce bucket 0", "COMM_COLL_NODE", (2,), 200, 100, 4096, "ALL_REDUCE"),
        Node(4, "forward_backward", "COMP_NODE", (2,), 300, 200, None, None),  # it did not wait for the bucket
        Node(5, "all_reduce bucket 1", "COMM_COLL_NODE", (3, 4), 510, 90, 512, "ALL_REDUCE"),
        Node(6, "optimizer", "COMP_NODE", (4, 3, 5), 600, 400, None, None),
    ]


def test_numbers_of_any_size_are_encoded(tmp_path):
    far = 1 << 50
    one = Timeline(0, {}, [Span(far * 1000, far * 1000 + 130_000, 0, "optimizer" * 30, "phase", {}),
                           Span(far * 1000, far * 1000 + 130_000, 0, "loss", "phase", {})])  # fmt: skip
    (tmp_path / "one.et").write_bytes(b"\x00" + b"".join(bytes([len(n)]) + n for n in nodes_of(one)))
    (node,) = chakra_nodes(tmp_path / "one.et")[1]
    assert (node.begin_us, node.us, node.name) == (far, 130, "loss")


def test_otf2_has_every_slice(trace, tmp_path):
    pytest.importorskip("otf2", reason="needs the wheel otf2: pip install 'clcomm[otf2]'")
    assert cli.main(["trace", str(trace), "--to", "otf2", "-o", str(tmp_path / "otf2")]) == 0
    assert otf2_spans(tmp_path / "otf2" / "traces.otf2") == sorted(
        (one.rank, span.name, span.begin_ns, span.end_ns, span.args.get("bytes"))
        for one in read_timeline(trace) for span in one.spans
    )  # fmt: skip
    with pytest.raises(ArgumentError, match=r"\A-o: expected a folder that is not there yet, got [^\n]*\Z"):
        cli.main(["trace", str(trace), "--to", "otf2", "-o", str(tmp_path / "otf2")])


def test_slices_that_clocks_make_overlap_stay_in_order():
    times = {"a": (0, 100_000), "b": (99_000, 150_000), "c": (99_500, 99_500), "d": (120_000, 152_000)}
    spans = [Span(begin_ns, end_ns, 0, name, "", {}) for name, (begin_ns, end_ns) in times.items()]
    found = [(at, enters, span.name) for at, enters, span in edges(spans)]
    assert [at for at, _, _ in found] == sorted(at for at, _, _ in found)
    assert found == [
        (0, True, "a"), (99_000, False, "a"), (99_000, True, "b"), (99_500, True, "c"), (99_500, False, "c"),
        (120_000, True, "d"), (150_000, False, "d"), (150_000, False, "b"),  # 2 us less of d, as b has ended
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b'{"traceEvents": []}', b'{"traceEvents": [{"pid": 1}]}', b"\x1f\x8b\x00",
     json.dumps({"traceEvents": [event(0, STEPS, -1, 1, "step")]}).encode()],
)  # fmt: skip
def test_another_file_is_refused_in_one_line(text, tmp_path):
    (tmp_path / "other.json").write_bytes(text)
    with pytest.raises(DataError, match=r"\A[^\n]*other.json: expected a file of --trace, which is JSON, [^\n]*\Z"):
        cli.main(["trace", str(tmp_path / "other.json"), "--to", "chakra", "-o", str(tmp_path / "et")])


def test_a_format_and_a_folder_go_together(trace):
    for given in (["--to", "otf2"], ["-o", "x"]):
        with pytest.raises(ArgumentError, match=r"\Atrace: expected --to FORMAT and -o DIR together\Z"):
            cli.main(["trace", str(trace), *given])
