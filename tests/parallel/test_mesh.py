"""Meshes: each axis's Communicator holds the ranks that the layout gives it; bad ones are refused on all ranks."""

from __future__ import annotations

import math
import pickle
import re

import numpy as np
import pytest

from clcomm import Communicator, Mesh
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.comm.transport import mpi_communicators
from clcomm.parallel import DeviceMesh
from clcomm.parallel.mesh import _say_type_is_unused, layout
from tests.helpers import one_line
from tests.transport.references import layout_hosts, pretended_host


def shapes(ranks: int) -> list[dict[str, int]]:
    """Return all meshes of up to three axes for a number of ranks, the tensor-parallel one in any place."""
    found = [{"dp": ranks}, {"tp": ranks}]
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for dp in divisors:
        for tp in divisors:
            if ranks % (dp * tp) == 0:
                found += [{"dp": dp, "tp": tp, "pp": ranks // dp // tp}, {"tp": tp, "pp": ranks // dp // tp, "dp": dp}]
    return found


@pytest.mark.parametrize("number", range(20))
def test_each_axis_holds_the_ranks_of_the_layout(comm, number):
    every = shapes(comm.size)
    shape = every[number % len(every)]
    mesh = Mesh(comm, **shape)
    grid = layout(shape, [list(range(comm.size))])
    assert mesh.shape == shape and np.array_equal(mesh.ranks, grid)
    place = tuple(mesh.coordinates.values())
    assert grid[place] == comm.rank == mesh.rank_at() == mesh.rank_at(**mesh.coordinates)
    for axis, name in enumerate(shape):
        peers = grid[tuple(slice(None) if other == axis else at for other, at in enumerate(place))].tolist()
        part = mesh[name]
        assert (part.rank, part.size, part.name) == (mesh.coordinates[name], shape[name], name)
        assert part.all_gather_object(comm.rank) == peers == [mesh.rank_at(**{name: at}) for at in range(shape[name])]
        summed = part.all_reduce(np.array([10.0**comm.rank]))
        assert summed[0] == sum(10.0**rank for rank in peers)
    assert comm.all_gather_object(str(mesh)) == [str(mesh)] * comm.size
    assert repr(mesh) == f"Mesh({', '.join(f'{name}={size}' for name, size in shape.items())})"
    assert "dp" in mesh or "dp" not in shape


def test_axes_have_the_settings_of_the_whole():
    whole = Communicator(bucket_size="16KiB", use_bucketing=False, timeout_s=77)
    part = Mesh(whole, dp=-1)["dp"]
    assert (part.bucket_size, part.use_bucketing, part.lifetime.limits.timeout_s) == (16384, False, 77)


test_axes_have_the_settings_of_the_whole = pytest.mark.mpi(min_size=1)(test_axes_have_the_settings_of_the_whole)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["halves", "first-alone", "interleaved", "crossed"])
def test_tensor_parallel_peers_share_a_host(monkeypatch, name, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(mpi_communicators, "host_of", lambda comm: pretended_host(name, comm))
        comm = Communicator()
        hosts = [list(ranks) for ranks in layout_hosts(name, comm.size)]
        assert comm.hosts == len(hosts)
        size = 2 if comm.size % 2 == 0 else comm.size
        patch.undo()
        mesh = Mesh(comm, dp=-1, tp=size)
    assert np.array_equal(mesh.ranks, layout(mesh.shape, hosts))
    host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
    spread = sum(len({host_of[int(rank)] for rank in row}) > 1 for row in mesh.ranks)
    warned = [record.getMessage() for record in caplog.records if "groups along tp" in record.getMessage()]
    assert len(warned) == (spread > 0 and comm.rank == 0)
    assert all(f"{rank}@{host}" in str(mesh) for rank, host in host_of.items())


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (lambda n: {"dp": n + 1}, lambda n: f"got dp={n + 1}, which is {n + 1}, for {n} ranks"),
        (lambda n: {"dp": n, "tp": 2}, lambda n: f"got dp={n}, tp=2, which is {2 * n}, for {n} ranks"),
        (lambda n: {"dp": -1, "tp": n + 1}, lambda n: f"got dp=-1, tp={n + 1} for {n} ranks"),
        (lambda n: {"dp": 0}, lambda n: "expected sizes from 1 up, or -1 for what remains, got dp=0"),
        (lambda n: {}, lambda n: f"expected an axis such as dp={n}, got none"),
    ],
)
def test_bad_sizes_are_refused_on_all_ranks(comm, axes, message):
    with pytest.raises(ArgumentError, match=re.escape(message(comm.size))) as caught:
        Mesh(comm, **axes(comm.size))
    text = one_line(caught)
    assert comm.all_gather_object(text) == [text] * comm.size


@pytest.mark.mpi(min_size=2)
def test_ranks_that_differ_get_the_same_error(several):
    with pytest.raises(
        MismatchError, match=r"^mesh: expected the same on every rank, but entry 0 is 'dp=-1' on rank.* 0"
    ) as caught:
        Mesh(several, **({"tp": -1} if several.rank == several.size - 1 else {"dp": -1}))
    text = one_line(caught)
    assert several.all_gather_object(text) == [text] * several.size


def test_unknown_names_and_coordinates_are_refused(comm):
    mesh = Mesh(comm, dp=-1, tp=1)
    with pytest.raises(ArgumentError, match=r"^mesh: expected one of its axes dp, tp, got 'pp'$"):
        mesh["pp"]
    with pytest.raises(ArgumentError, match=r"^mesh: expected one of its axes dp, tp, got 'pp'$"):
        mesh.rank_at(pp=0)
    with pytest.raises(ArgumentError, match=r"^tp: expected a coordinate from 0 to 0, got 1$"):
        mesh.rank_at(tp=1)
    with pytest.raises(ArgumentError, match=r"^Mesh: expected to stay in its process"):
        pickle.dumps(mesh)
    with pytest.raises(ArgumentError, match=r"^comm: expected a Communicator, got int$"):
        Mesh(3, dp=3)


def test_a_mesh_is_closed_with_its_ranks_or_before(comm):
    with Mesh(comm, dp=-1) as first:
        part = first["dp"]
        part.barrier()
    with pytest.raises(ArgumentError, match="expected an open one"):
        part.barrier()
    second = Mesh(comm, dp=-1, tp=1)
    comm.finalize()
    for name in second.shape:
        with pytest.raises(ArgumentError, match="expected an open one"):
            second[name].barrier()
    second.close()


def test_stats_of_the_whole_name_the_axes(comm):
    mesh = Mesh(comm, dp=-1, tp=1)
    for name in mesh.shape:
        mesh[name].all_reduce(np.ones(100), label="x")
    table = str(comm.merged_stats().table())
    assert "x on dp" in table and "x on tp" in table


# --- veScale's names ---


def test_a_device_mesh_has_the_ranks_that_it_is_given(comm):
    grid = np.arange(comm.size)[::-1].reshape(-1, 1)
    mesh = DeviceMesh(grid.tolist(), mesh_dim_names=("DP", "TP"), comm=comm)
    assert mesh["DP"].all_gather_object(comm.rank) == grid[:, 0].tolist() and mesh["TP"].size == 1
    assert mesh.shape == {"DP": comm.size, "TP": 1} and math.prod(mesh.shape.values()) == comm.size


def test_a_device_meshs_device_type_is_said_once_to_be_unused(comm, caplog):
    grid = np.arange(comm.size).reshape(-1, 1)
    _say_type_is_unused.cache_clear()
    first = DeviceMesh("cuda", grid, mesh_dim_names=("DP", "TP"), comm=comm)
    named = DeviceMesh(device_type="cuda", mesh=grid, mesh_dim_names=("DP", "TP"), comm=comm)
    assert np.array_equal(first.ranks, grid) and np.array_equal(named.ranks, grid)
    said = [record.getMessage() for record in caplog.records if "device type 'cuda'" in record.getMessage()]
    assert len(said) == (comm.rank == 0)
    with pytest.raises(ArgumentError, match=r"^device_type: expected a word such as 'cuda', got 3$"):
        DeviceMesh(3, grid, mesh_dim_names=("DP", "TP"), comm=comm)


@pytest.mark.parametrize(
    ("grid", "names", "message"),
    [
        (lambda n: [*range(n)], ("a", "b"), "mesh_dim_names: expected a name for each of 1 dimensions, got a, b"),
        (lambda n: [[*range(n)]], ("a", "a"), "mesh_dim_names: expected a name for each of 2 dimensions, got a, a"),
        (lambda n: [*range(1, n + 1)], ("a",), "mesh: expected each of"),
        (lambda n: [*range(n + 1)], ("a",), "mesh: expected each of"),
    ],
)
def test_a_device_mesh_without_each_rank_or_a_name_for_each_dimension_is_refused(comm, grid, names, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        DeviceMesh(grid(comm.size), mesh_dim_names=names, comm=comm)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("periodic", [False, True])
def test_a_shift_gives_the_ranks_before_and_after(auto, periodic):
    rows = 2 if auto.size % 2 == 0 else 1
    mesh = Mesh(auto, rows=rows, columns=-1)
    for name in ("rows", "columns"):
        at, size = mesh.coordinates[name], mesh.shape[name]
        for by in (-2, -1, 0, 1, 5):
            source, dest = mesh.shift(name, by, periodic=periodic)
            for found, place in ((source, at - by), (dest, at + by)):
                if not 0 <= place < size and not periodic:
                    assert found is None
                else:
                    assert found == mesh.rank_at(**{name: place % size})
            got = auto.sendrecv(np.array(auto.rank), dest, source=source)
            assert got == source
    with pytest.raises(ArgumentError, match="mesh: expected one of its axes rows, columns, got 'depth'"):
        mesh.shift("depth")
