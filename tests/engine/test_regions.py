"""Sub-buffers: made once for each region, and released after all of them in the reverse order of their making."""

from __future__ import annotations

from itertools import permutations

import pyopencl as cl
import pytest

from clcomm.engine import memory

REGIONS = [(0, 4096), (4096, 8192), (0, 8192)]  # that overlap


@pytest.mark.parametrize("order", list(permutations(range(len(REGIONS)))))
def test_regions_are_released_last_first(device, monkeypatch, order):
    released = []

    class Noted(memory._Regions):
        def popitem(self):
            region, buffer = super().popitem()
            released.append((region[:2], buffer.get_info(cl.mem_info.REFERENCE_COUNT)))
            return region, buffer

    monkeypatch.setattr(memory, "_Regions", Noted)
    before = device.active_bytes
    whole = device.memory.exact(3 * 4096)
    parts = {index: whole.get_sub_region(*region) for index, region in enumerate(REGIONS)}
    assert [whole.get_sub_region(*region).int_ptr for region in REGIONS] == [each.int_ptr for each in parts.values()]
    del whole
    for index in order:
        assert device.active_bytes > before
        del parts[index]
    assert device.active_bytes == before and not released
    device.allocate(4)
    assert released == [(region, 1) for region in reversed(REGIONS)]
