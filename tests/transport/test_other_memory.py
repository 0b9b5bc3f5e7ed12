"""Reads of other ranks' memory, and ranks of which one may not."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from clcomm.base.errors import ResourceError
from clcomm.comm.transport import direct_exchange
from clcomm.comm.transport.direct_exchange import DirectExchange, OtherMemory

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def memory(auto):
    return OtherMemory.open(auto.world.shared.rendezvous)


def test_each_rank_reads_what_the_others_have(auto, memory):
    own = np.arange(100_000, dtype=np.int64) * (auto.rank + 1)
    places = auto.all_gather_object(own.ctypes.data)
    got = np.zeros_like(own)
    for rank, place in enumerate(places):
        memory.read(rank, place, got)
        assert (got == np.arange(100_000) * (rank + 1)).all()
    auto.barrier()


def test_one_rank_that_may_not_read_is_enough_for_all_to_leave_it(auto, monkeypatch):
    real = OtherMemory.read

    def refused(self, rank, address, out):
        if auto.rank == 1:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        real(self, rank, address, out)

    monkeypatch.setattr(OtherMemory, "read", refused)
    assert OtherMemory.open(auto.world.shared.rendezvous) is None


def test_another_process_of_that_number_is_told_by_its_memory(auto, monkeypatch):
    """Ranks in containers count processes anew: the number of one is that of another process in the other."""
    monkeypatch.setattr(OtherMemory, "read", lambda self, rank, address, out: out.fill(5))
    assert OtherMemory.open(auto.world.shared.rendezvous) is None


def test_without_the_call_nothing_is_read(auto, monkeypatch):
    def missing():
        raise AttributeError("undefined symbol: process_vm_readv")

    monkeypatch.setattr(direct_exchange, "_function", missing)
    assert OtherMemory.open(auto.world.shared.rendezvous) is None


def test_memory_that_is_gone_is_an_error_with_rank_and_reason(auto, memory):
    with pytest.raises(OSError, match="Bad address"):
        memory.read(1 - auto.rank if auto.rank < 2 else 0, 8, np.zeros(1))
    direct = DirectExchange(auto.world.shared.rendezvous, memory)
    with pytest.raises(ResourceError, match=r"^collective: expected to read the array of rank 0 on this host, got Bad"):
        direct._read(0, 8, np.zeros(1))
    auto.barrier()


@pytest.mark.parametrize(("scope", "asks"), [("0\n", False), ("1\n", True), ("2\n", False), ("", False)])
def test_siblings_are_let_in_where_yama_asks_for_it(monkeypatch, tmp_path, scope, asks):
    called = []

    class Library:
        def __init__(self, name):
            self.prctl = lambda *arguments: called.append(arguments)

    (tmp_path / "ptrace_scope").write_text(scope)
    monkeypatch.setattr(direct_exchange, "_YAMA", tmp_path / "ptrace_scope")
    monkeypatch.setattr(direct_exchange.ctypes, "CDLL", Library)
    direct_exchange._let_siblings_read.__wrapped__()
    assert [(call[0], call[1].value) for call in called] == [(0x59616D61, os.getppid())] * asks
