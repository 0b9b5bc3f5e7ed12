"""What the adapters' tests share."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clcomm.base.flat_space.layout import FlatLayout
from clcomm.sync.adapters.adapter import FlatArrays


@pytest.fixture
def attach() -> Callable[[Any], SimpleNamespace]:
    """Give an adapter a flat space of its own; return adapter, layout, arrays and a bucket of everything."""

    def attach(adapter: Any) -> SimpleNamespace:
        layout = FlatLayout(adapter.specs)
        arrays = FlatArrays(*(np.full(layout.span, fill, np.uint8) for fill in (0, 255, 0)))
        adapter.attach(layout, arrays)
        buckets = layout.buckets(1 << 30)
        return SimpleNamespace(adapter=adapter, layout=layout, arrays=arrays, buckets=buckets)

    return attach
