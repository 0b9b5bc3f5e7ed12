"""What the adapters' tests share."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clcomm.layout import FlatLayout
from clcomm.replica import FlatArrays


@pytest.fixture
def attach() -> Callable[[Any], SimpleNamespace]:
    """Give a replica a flat space of its own; the result holds replica, layout, arrays and a bucket of everything."""

    def attach(replica: Any) -> SimpleNamespace:
        layout = FlatLayout(replica.specs)
        arrays = FlatArrays(*(np.full(layout.span, fill, np.uint8) for fill in (0, 255, 0)))
        replica.attach(layout, arrays)
        buckets = layout.buckets(1 << 30)
        return SimpleNamespace(replica=replica, layout=layout, arrays=arrays, buckets=buckets)

    return attach
