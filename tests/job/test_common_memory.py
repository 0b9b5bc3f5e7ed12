"""Memory that a host's ranks share, and its descriptors."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from clcomm.comm.transport.common_memory import common_memory

ALONE = SimpleNamespace(Get_rank=lambda: 0, bcast=lambda value, root: value, allgather=lambda value: [value])


def test_the_memory_is_zero_and_its_descriptor_open() -> None:
    memory, descriptor = common_memory(ALONE, "clcomm-test", 100)
    try:
        assert memory is not None and bytes(memory) == bytes(100)
        assert os.fstat(descriptor).st_size == 100
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("missing", ["memfd_create", "ftruncate"])
def test_without_memory_no_descriptor_stays_open(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    made: list[int] = []
    create = os.memfd_create

    def counted(name: str) -> int:
        made.append(create(name))
        return made[-1]

    monkeypatch.setattr(os, "memfd_create", counted)
    monkeypatch.setattr(os, missing, refuse)
    assert common_memory(ALONE, "clcomm-test", 100) == (None, -1)
    assert len(made) == (missing == "ftruncate")
    for descriptor in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
