"""Perfetto's own trace processor reads a trace, where it is there: PyPI's perfetto, and its binary on the PATH."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.engine import Device
from clcomm.trace import Trace
from tests.trace import rules

trace_processor = pytest.importorskip("perfetto.trace_processor", reason="perfetto is not installed")
SHELL = shutil.which("trace_processor_shell") or shutil.which("trace_processor")


@pytest.mark.skipif(SHELL is None, reason="no trace_processor_shell on the PATH; the package would download it")
def test_perfettos_trace_processor_finds_the_same(tmp_path):
    comm, device = Communicator(transport="solo"), Device.select("cpu", cores=1)
    path, size = tmp_path / "trace.json.gz", np.int32(1 << 16)
    with Trace(comm, path, device=device):
        for _ in range(10):
            with comm.phase("step"):
                device.launch(
                    device.kernel("elementwise", "fill"), *device.grid(size), device.allocate(4 * size), 1.0, size
                )
                device.finish()
                comm.all_reduce(np.ones(10), label="gradients", bucket=0)
    events = [event for event in rules.load(path)["traceEvents"] if event["ph"] == "X"]
    config = trace_processor.TraceProcessorConfig(bin_path=SHELL)
    with trace_processor.TraceProcessor(trace=str(path), config=config) as processor:
        slices = {(row.name, row.dur) for row in processor.query("select name, dur from slice")}
        flows = list(processor.query("select slice_out, slice_in from flow"))
        faults = [row.name for row in processor.query("select name from stats where severity = 'error' and value > 0")]
    assert slices == {(event["name"], rules.ns(event)[1] - rules.ns(event)[0]) for event in events}
    assert len(flows) == sum("flow_in" in event for event in events) == 10
    assert faults == []
