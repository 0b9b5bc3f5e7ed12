"""Horovod's calls for each test, on as many ranks as pytest has."""

from __future__ import annotations

import pytest


@pytest.fixture
def hvd(request):
    """clcomm.horovod between `init` and `shutdown`."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    import clcomm.horovod as module

    module.init()
    yield module
    if not request.node.has_failed:  # then the other ranks are elsewhere, and it would wait for them
        module.shutdown()
