"""Transports under test: each one with a way to make arrays that it can move."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from clcomm.comm.transport.base import Transport
from clcomm.comm.transport.hierarchical import HierarchicalTransport
from clcomm.comm.transport.hosts import Hosts
from clcomm.comm.transport.memory_comm import MemoryComm
from clcomm.comm.transport.mpi_communicators import host_of
from clcomm.comm.transport.mpi_runtime import world
from clcomm.comm.transport.mpi_transport import MpiTransport
from clcomm.comm.transport.pending import Pending
from clcomm.comm.transport.reduction import prepared_reduction_by_hosts
from clcomm.comm.transport.shared import SharedTransport
from clcomm.comm.transport.solo import SoloTransport
from clcomm.engine.fold import DeviceFold
from tests.helpers import cpu_device
from tests.transport.references import LAYOUTS, folded, layout_hosts, pretended_host

#: Bytes that some transports here move in one MPI call: so few that larger arrays take several.
PIECE_BYTES = 30_000


@dataclass
class Bench:
    """A transport and its memory: `array` is this rank's own, `common` one memory where the transport has that."""

    transport: Transport
    allocate: Callable[[int], np.ndarray] = lambda nbytes: np.zeros(nbytes, np.uint8)
    allocate_common: Callable[[int], np.ndarray] = lambda nbytes: np.zeros(nbytes, np.uint8)
    kept: list[np.ndarray] = field(default_factory=list)
    hosts: tuple[tuple[int, ...], ...] = ()
    release: Callable[[], object] = lambda: None

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.world_size

    def array(self, values: np.ndarray) -> np.ndarray:
        """Return a copy of one-dimensional `values` in memory that the transport can move; the same length on all."""
        return self._fill(self.allocate(max(1, values.nbytes)), values)

    def common(self, values: np.ndarray) -> np.ndarray:
        """Return room for `values` that is common to the ranks where the transport has such memory."""
        return self._fill(self.allocate_common(max(1, values.nbytes)), values)

    def folded(self, rows: list[np.ndarray], op: str) -> np.ndarray:
        """Return the reduction of the ranks' rows, in this transport's order."""
        return folded(rows, op, self.hosts or (range(self.size),))

    def close(self) -> None:
        self.transport.close()
        self.release()

    def _fill(self, memory: np.ndarray, values: np.ndarray) -> np.ndarray:
        array = memory[: values.nbytes].view(values.dtype)
        if values.nbytes:
            array[:] = values
        self.transport.barrier()  # a common array is written by all of them
        return array


def _shared_transport(comm, pending=None) -> SharedTransport:
    host = host_of(comm)
    if host.Get_size() != comm.Get_size():
        pytest.skip("shared: needs all ranks on one host")
    return SharedTransport(host, pending)


def _hierarchical_bench(layout: str, comm, pending=None) -> Bench:
    if host_of(comm).Get_size() != comm.Get_size():
        pytest.skip("hierarchical: pretended hosts need all ranks on one host")
    size = comm.Get_size()
    alike = next(other for other in LAYOUTS if layout_hosts(other, size) == layout_hosts(layout, size))
    if alike != layout:
        pytest.skip(f"hierarchical: on so many ranks the hosts are those of {alike!r}")
    host = pretended_host(layout, comm)
    hosts = Hosts.of(comm, host)
    base = MpiTransport(comm, pending, partial(prepared_reduction_by_hosts, hosts=hosts.ranks))
    made = HierarchicalTransport(base, host, hosts)
    if layout == "halves":
        made.fold = DeviceFold(cpu_device("cpu"))
    if layout == "first-alone":
        for each in (base, made.peers or base):
            each.most_bytes = PIECE_BYTES
    return Bench(made, made.allocate, made.allocate_common, hosts=hosts.ranks, release=base.close)


def make_bench(name: str, comm, pending: deque[Pending] | None = None) -> Bench:
    """Return a transport by name, with its memory, on all ranks of `comm`."""
    if name == "solo":
        return Bench(SoloTransport())
    if name.startswith("without MPI"):
        comm = MemoryComm.of(comm)
        name = name.removeprefix("without MPI, ")
    if name.startswith("mpi"):
        made = MpiTransport(comm, pending)
        if name == "mpi, in pieces":
            made.most_bytes = PIECE_BYTES
        return Bench(made)
    if name in LAYOUTS:
        return _hierarchical_bench(name, comm, pending)
    shared = _shared_transport(comm, pending)
    if name == "shared, folded by the device":
        shared.fold = DeviceFold(cpu_device("cpu"))
    return Bench(shared, shared.allocate, shared.allocate_common)


def every_transport():
    """Return the parameters that run a test with each transport, solo in plain pytest alone."""
    return [
        pytest.param("solo"),
        pytest.param("mpi", marks=pytest.mark.mpi(min_size=1)),
        pytest.param("mpi, in pieces", marks=pytest.mark.mpi(min_size=2)),
        pytest.param("shared", marks=pytest.mark.mpi(min_size=1)),
        pytest.param("without MPI, mpi", marks=pytest.mark.mpi(min_size=1)),
        pytest.param("without MPI, shared", marks=pytest.mark.mpi(min_size=1)),
        pytest.param("shared, folded by the device", marks=pytest.mark.mpi(min_size=1)),
        *(pytest.param(layout, marks=pytest.mark.mpi(min_size=1)) for layout in LAYOUTS),
    ]


@pytest.fixture(scope="module", params=every_transport())
def bench(request) -> Iterator[Bench]:
    """One transport after the other, each for all of a file's tests."""
    if request.param == "solo":
        yield make_bench("solo", None)
        return
    comm = world().Dup()
    made = make_bench(request.param, comm)
    yield made
    if not request.session.testsfailed:  # the other ranks are not in this call, and close would wait for them
        made.close()
        comm.Free()
