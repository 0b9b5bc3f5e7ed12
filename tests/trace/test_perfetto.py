"""Perfetto's own trace processor reads a trace as it was meant: the slices, threads and flows, and the overlap."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.engine import Device
from clcomm.trace import Trace
from tests.trace import perfetto_page, rules

OVERLAP = """
select extract_arg(c.arg_set_id, 'args.exposed us'), c.dur, sum(min(c.ts + c.dur, k.ts + k.dur) - max(c.ts, k.ts))
from slice c join slice k on k.category = 'kernel' and k.ts < c.ts + c.dur and c.ts < k.ts + k.dur
where c.category = 'communication' and extract_arg(c.arg_set_id, 'args.exposed us') is not null
group by c.id
"""


@pytest.mark.skipif(bool(perfetto_page.refusal()), reason=perfetto_page.refusal())
def test_perfetto_finds_what_is_in_a_trace(tmp_path):
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
        overlaps = page.query(OVERLAP)
    assert sorted((name, dur) for name, dur, *_ in slices) == sorted(
        (e["name"], rules.ns(e)[1] - rules.ns(e)[0]) for e in events
    )
    assert {thread for *_, thread, _ in slices} == {"steps", "communication", "device"}
    assert all(process.startswith("rank 0: ") for *_, process in slices)
    assert sorted(map(tuple, flows)) == sorted([("fill", f"all_reduce bucket {number}") for number in (0, 1)] * 10)
    assert len(overlaps) == 10
    # Within 5% where nothing else wants the cores; a test only tells that the two mean the same time.
    assert min(abs(shown / (dur - 1000 * exposed_us) - 1) for exposed_us, dur, shown in overlaps) < 0.25
