"""Perfetto's own trace processor reads a trace as it was meant: the slices, threads and flows, and the overlap."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.engine import Device
from clcomm.trace import Trace
from clcomm.transport import Pending
from clcomm.transport.solo import SoloTransport
from tests.trace import perfetto_page, rules

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
