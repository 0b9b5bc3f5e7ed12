"""Perfetto's own trace processor reads a trace as it was meant: the slices, threads and flows, and the overlap."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.comm.stats.events import Phase
from clcomm.comm.transport.pending import Pending
from clcomm.comm.transport.solo import SoloTransport
from clcomm.engine import Device
from clcomm.insight.trace import Trace
from tests.trace import perfetto_page, rules
from tests.trace.parts import parts_of, reduction

#: What the documentation asks, in ms by process.
HIDDEN = re.findall(r"```sql\n(.*?)```", (Path(__file__).parents[2] / "docs" / "tracing.md").read_text(), re.DOTALL)[0]
OVERLAP = """
select w.dur, min(c.ts + c.dur, w.ts + w.dur) - max(c.ts, w.ts) from slice c join slice w
on w.name = 'computing' and w.ts < c.ts + c.dur and c.ts < w.ts + w.dur
where extract_arg(c.arg_set_id, 'args.exposed us') is not null
"""


def begun(source, out, op):
    """Begin an all-reduce of one rank that is done when it is waited for."""
    pending = Pending(deque(), None, lambda: np.copyto(out, source))
    pending.waits = []
    return pending


@pytest.mark.skipif(bool(perfetto_page.refusal()), reason=perfetto_page.refusal())
def test_perfetto_finds_what_is_in_a_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(SoloTransport, "start_all_reduce", lambda self, *arrays: begun(*arrays))
    comm, device = Communicator(transport="solo"), Device.select("cpu", cores=1)
    path, kernel = tmp_path / "trace.json.gz", device.kernel("elementwise", "fill")
    buffer, size = device.allocate(4 << 24), np.int32(1 << 24)
    gradients = np.ones(1000, np.float32)
    with Trace(comm, path, device=device):
        for _ in range(10):
            with comm.phase("step"):
                device.launch(kernel, *device.grid(size), buffer, 1.0, size)
                device.finish()
                comm.all_reduce(gradients, label="gradients", bucket=0)
                handle = comm.all_reduce_async(gradients, label="gradients", bucket=1)
                with comm.phase("computing"):
                    device.launch(kernel, *device.grid(size), buffer, 2.0, size)
                    device.finish()
                handle.wait()
    events = [event for event in rules.load(path)["traceEvents"] if event["ph"] == "X"]
    with perfetto_page.opened(path, tmp_path) as page:
        assert page.query("select name, value from stats where severity != 'info' and value > 0") == []
        slices = page.query(
            "select s.name, s.dur, t.name, p.name from slice s join thread_track k on s.track_id = k.id "
            "join thread t using (utid) join process p using (upid) order by s.id"
        )
        flows = page.query(
            "select o.name, i.name from flow join slice o on slice_out = o.id join slice i on slice_in = i.id"
        )
        hidden, overlaps = page.query(HIDDEN), page.query(OVERLAP)
    assert sorted((name, dur) for name, dur, *_ in slices) == sorted(
        (e["name"], rules.ns(e)[1] - rules.ns(e)[0]) for e in events
    )
    assert {thread for *_, thread, _ in slices} == {"steps", "communication", "device"}
    assert all(process.startswith("rank 0: ") for *_, process in slices)
    assert sorted(map(tuple, flows)) == sorted([("fill", f"all_reduce bucket {number}") for number in (0, 1)] * 10)
    ((_, hidden_ms),) = hidden
    assert len(overlaps) == 10
    assert abs(hidden_ms * 1e-3 / comm.stats.total("all_reduce")["hidden_s"] - 1) < 0.001
    for whole, shown in overlaps:
        assert shown == pytest.approx(whole, abs=10)  # all of the computing lies within
    assert sum(shown for _, shown in overlaps) <= 1e6 * hidden_ms + 100


@pytest.mark.skipif(bool(perfetto_page.refusal()), reason=perfetto_page.refusal())
def test_perfetto_shows_ranks_in_order_their_counters_and_who_was_waited_for(tmp_path):
    """Rank 2 comes last to every collective but one, and rank 0 to none."""
    ranks, last = 12, [2, 2, 1, 2]

    def rows(rank):
        collectives = [
            reduction(
                number + 0.5 + 0.1 * (rank == slow), 0.2 - 0.1 * (rank == slow), number, sequence=number + 1,
                last_rank=slow, wait_s=0.0 if rank == slow else 0.11,
            )
            for number, slow in enumerate(last)
        ]  # fmt: skip
        figures = [(("step", number + 1), ("epoch", 1), ("loss", 0.5 * number)) for number in range(len(last))]
        phases = [Phase("step", float(number), 0.9, figures=each) for number, each in enumerate(figures)]
        return {"collectives": collectives, "phases": phases}

    parts_of(tmp_path, ranks, rows)
    with perfetto_page.opened(tmp_path / "trace.json", tmp_path) as page:
        assert page.query("select name, value from stats where severity != 'info' and value > 0") == []
        shown = page.run("return window.app.trace.workspace.children.map(each => each.name)")
        flows = page.query(
            "select p.pid, q.pid from flow join slice o on slice_out = o.id join slice i on slice_in = i.id "
            "join thread_track k on o.track_id = k.id join thread t using (utid) join process p using (upid) "
            "join thread_track l on i.track_id = l.id join thread u on l.utid = u.utid "
            "join process q on u.upid = q.upid"
        )
        counters = page.query(
            "select t.name, count(*), max(c.value) from counter c join counter_track t on c.track_id = t.id group by 1"
        )
        steps = page.query("select distinct extract_arg(arg_set_id, 'args.step') from slice where name = 'step'")
    assert [name.split(":")[0] for name in shown] == [f"rank {rank:02}" for rank in range(ranks)]
    expected = [(1000 + slow, 1000 + rank) for slow in last for rank in range(ranks) if rank != slow]
    assert sorted(map(tuple, flows)) == sorted(expected)
    assert sorted(map(tuple, counters)) == [("bytes of this rank", 48, 4000), ("loss of this rank", 48, 1.5)]
    assert sorted(number for (number,) in steps) == [1, 2, 3, 4]
