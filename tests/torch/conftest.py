"""A default process group on backend clcomm, one for all tests of a run."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402


@pytest.fixture(scope="session")
def world():
    """The default group, made as a script makes it."""
    import clcomm.torch  # noqa: F401 - registers the backend

    # Plain pytest and mpiexec alike: nothing but the import and the backend's name.
    dist.init_process_group("clcomm", timeout=timedelta(seconds=float(os.environ.get("CLCOMM_TIMEOUT_S", 300))))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def groups(world):
    """Groups of this run's ranks by name: all, the even ones, the last alone, all in another group."""
    size = dist.get_world_size()
    members = {"world": range(size), "even": range(0, size, 2), "last": [size - 1], "again": range(size)}
    return {
        name: (list(ranks), world if name == "world" else dist.new_group(list(ranks)))
        for name, ranks in members.items()
    }
