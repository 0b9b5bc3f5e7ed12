"""Devices that count as having half precision."""

from __future__ import annotations

import pytest

from tests.helpers import cpu_device


@pytest.fixture(autouse=True)
def _half_precision(monkeypatch):
    for kind in ("cpu", "gpu"):
        monkeypatch.setattr(cpu_device(kind), "has_half", True)
